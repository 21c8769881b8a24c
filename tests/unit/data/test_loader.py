"""Sharded loader: slices, ends of epochs, position with and without workers, resuming, streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from mpispeed.base.errors import ConfigError
from mpispeed.data import RepeatingLoader, SampleOrder, ShardedLoader


def loader_of(dataset: Any, rank: int = 0, size: int = 1, **settings: Any) -> ShardedLoader:
    return ShardedLoader(dataset, **{"micro_batch": 2, "rank": rank, "size": size, "collate_fn": list} | settings)


class Stream(IterableDataset):
    """The numbers 0, 1, ..., length - 1, counting what is read."""

    def __init__(self, length: int) -> None:
        self.length, self.read, self.epochs = length, 0, []

    def __iter__(self) -> Iterator[int]:
        for item in range(self.length):
            self.read += 1
            yield item


class SeekingStream(Stream):
    """A stream that can start anywhere."""

    start = 0

    def seek(self, position: int) -> None:
        self.start = position

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        for item in range(self.start, self.length):
            self.read += 1
            yield item


class StatefulStream(Stream):
    """A stream that saves where it stands."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.read += 1
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_tensors_are_collated_and_every_sample_comes_once() -> None:
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    batches = list(ShardedLoader(data, micro_batch=3, rank=0, size=1))
    assert [tuple(x.shape) for x, _ in batches] == [(3, 2), (3, 2)]
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(6))


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 3), (True, 2)])
def test_the_end_of_an_epoch(drop_last: bool, steps: int) -> None:
    loaders = [loader_of(range(10), rank, 2, shuffle=False, drop_last=drop_last) for rank in range(2)]
    found = [list(loader) for loader in loaders]
    assert found[0] == [[0, 1], [4, 5], [8, 9]][:steps]
    assert found[1] == [[2, 3], [6, 7], [0, 1]][:steps]
    assert [len(loader) for loader in loaders] == [steps, steps]
    assert [loader.position for loader in loaders] == [10, 10]
    assert [loader.epoch for loader in loaders] == [1, 1]


def test_fewer_samples_than_ranks() -> None:
    found = [list(loader_of(range(1), rank, 3)) for rank in range(3)]
    assert found == [[[0, 0]]] * 3
    assert list(loader_of(range(1), drop_last=True)) == []


def test_step_samples_keeps_epochs_whole_under_accumulation() -> None:
    loader = loader_of(range(10), shuffle=False, step_samples=8)
    assert len(loader) == 8
    assert list(loader)[4:] == [[8, 9], [0, 1], [2, 3], [4, 5]]
    assert len(loader_of(range(10), step_samples=8, drop_last=True)) == 4


def test_epochs_are_shuffled_anew() -> None:
    loader = loader_of(range(100))
    first, second = list(loader), list(loader)
    assert first != second
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second)) == list(range(100))


@pytest.mark.parametrize("workers", [0, 2])
def test_position_counts_what_was_handed_out(workers: int) -> None:
    loader = loader_of(range(40), rank=1, size=2, workers=workers)
    batches = iter(loader)
    assert loader.position == 0
    for step in range(1, 4):
        next(batches)
        assert loader.position == 4 * step
    rest = list(batches)
    assert len(rest) == 7
    assert loader.position == 40


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_another_number_of_ranks_continues_the_stream(size: int, workers: int) -> None:
    """Four ranks of micro-batch 3 saved after two steps; the rest is dealt to 1, 2 or 3 ranks."""
    before = loader_of(range(60), 3, 4, micro_batch=3, seed=9)
    batches = iter(before)
    next(batches), next(batches)
    state = before.state_dict()
    assert state == {"position": 24, "epoch": 0, "length": 60, "seed": 9, "shuffle": True}
    loaders = [loader_of(range(60), r, size, micro_batch=12 // size, seed=9, workers=workers) for r in range(size)]
    for loader in loaders:
        loader.load_state_dict(state)
    steps = [list(chain.from_iterable(parts)) for parts in zip(*loaders, strict=True)]
    order = SampleOrder(60, 9, shuffle=True)
    assert list(chain.from_iterable(steps)) == order.indices(range(24, 60))
    assert loaders[0].position == 60


def test_breaking_out_of_a_pass_and_iterating_again_goes_on() -> None:
    loader = loader_of(range(8), shuffle=False)
    for batch in loader:
        if batch == [2, 3]:
            break
    assert list(loader) == [[4, 5], [6, 7]]


def test_a_state_from_the_very_end_begins_the_next_epoch() -> None:
    loader = loader_of(range(5), shuffle=False, drop_last=True)
    batches = iter(loader)
    assert [next(batches) for _ in range(2)] == [[0, 1], [2, 3]]
    again = loader_of(range(5), shuffle=False, drop_last=True)
    again.load_state_dict(loader.state_dict())
    assert list(again) == [[0, 1], [2, 3]]
    assert again.epoch == 2


def test_running_iterators_follow_a_loaded_state() -> None:
    loader = loader_of(range(10), shuffle=False)
    endless = RepeatingLoader(loader)
    start = loader.state_dict()
    assert [next(endless) for _ in range(2)] == [[0, 1], [2, 3]]
    loader.load_state_dict(start)
    assert [next(endless) for _ in range(6)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]
    assert loader.position == 12


def test_the_saved_seed_wins(caplog: pytest.LogCaptureFixture) -> None:
    saved = loader_of(range(20), seed=1).state_dict()
    loader = loader_of(range(20), seed=2)
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(saved)
    assert "sample order" in caplog.text
    assert list(loader) == list(loader_of(range(20), seed=1))


def test_a_state_of_other_data_is_refused() -> None:
    state = loader_of(range(20)).state_dict()
    with pytest.raises(ConfigError, match=r"20 samples.*21 samples.*same data"):
        loader_of(range(21)).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"20 samples.*a stream"):
        loader_of(Stream(20)).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_state_is_left_alone(workers: int) -> None:
    before = torch.get_rng_state()
    list(loader_of(range(10), workers=workers))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "settings",
    [{"micro_batch": 0}, {"rank": 2, "size": 2}, {"size": 0}, {"workers": -1}, {"step_samples": 5}],
)
def test_impossible_sizes_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        loader_of(range(4), **settings)


def test_data_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(ConfigError, match="generator"):
        loader_of(x for x in range(3))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_streams_are_dealt_in_blocks(size: int, workers: int) -> None:
    loaders = [loader_of(Stream(12), rank, size, micro_batch=6 // size, workers=workers) for rank in range(size)]
    steps = [list(chain.from_iterable(parts)) for parts in zip(*loaders, strict=True)]
    assert steps == [list(range(6)), list(range(6, 12))]
    assert loaders[0].position == 0
    assert loaders[0].epoch == 1


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 2), (True, 1)])
def test_a_short_block_of_a_stream_is_filled_or_left_out(drop_last: bool, steps: int) -> None:
    found = [list(loader_of(Stream(5), rank, 2, drop_last=drop_last)) for rank in range(2)]
    assert found[0] == [[0, 1], [4, 4]][:steps]
    assert found[1] == [[2, 3], [4, 4]][:steps]


@pytest.mark.parametrize(("kind", "reads"), [(Stream, 20), (SeekingStream, 12), (StatefulStream, 12)])
def test_a_stream_is_resumed_on_more_ranks(kind: type[Stream], reads: int) -> None:
    before = loader_of(kind(20), 0, 1, micro_batch=4)
    batches = iter(before)
    next(batches), next(batches)
    state = before.state_dict()
    assert state["position"] == 8
    loaders = [loader_of(kind(20), rank, 2) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state)
    passes = [list(loader) for loader in loaders]
    assert list(chain.from_iterable(a + b for a, b in zip(*passes, strict=True))) == list(range(8, 20))
    assert [loader.dataset.read for loader in loaders] == [reads, reads]
    assert next(iter(loaders[0])) == [0, 1], "the next pass starts at the beginning again"


def test_a_stream_without_length_has_no_len_and_hears_of_epochs() -> None:
    data = SeekingStream(4)
    loader = loader_of(data)
    with pytest.raises(TypeError):
        len(loader)
    list(loader), list(loader)
    assert data.epochs == [0, 1]


def test_repeating_loader() -> None:
    endless = RepeatingLoader([1, 2, 3])
    assert [next(endless) for _ in range(50)] == ([1, 2, 3] * 17)[:50]
    assert iter(endless) is endless
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))
