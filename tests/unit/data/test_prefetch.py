"""Batches ahead, by a thread or by processes: the same batches, one position, clean ends."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from mpispeed.data import RepeatingLoader, ShardedLoader
from mpispeed.data.prefetch import Ahead

WAYS = [
    {}, {"prefetch": 1}, {"prefetch": 4}, {"workers": 1}, {"workers": 3, "prefetch": 5},
    {"workers": 2, "persistent_workers": True}, {"workers": 2, "prefetch": 0},
]  # fmt: skip
ways = pytest.mark.parametrize("way", WAYS, ids=str)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread and no process outlives its loader."""
    yield
    gc.collect()
    assert not multiprocessing.active_children()
    assert [t.name for t in threading.enumerate() if t.name.startswith("mpispeed-data")] == []


class Mixed(Dataset):
    """Samples of many types; how they are read is a matter of the subclass."""

    def __init__(self, length: int = 41) -> None:
        self.length, self.calls = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.calls += 1
        return {
            "ids": torch.arange(index, index + 5), "half": torch.full((2, 3), index / 8, dtype=torch.bfloat16),
            "array": np.arange(4, dtype=np.float32) + index, "none": torch.empty(0, 3),
            "flag": torch.tensor(index % 2 > 0), "name": f"sample {index}", "tuple": (index, float(index)),
        }  # fmt: skip


class Several(Mixed):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.calls += 1
        return [super(Several, self).__getitem__(index) for index in indices]


class Whole(Mixed):
    def read_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"ids": torch.stack([torch.arange(index, index + 5) for index in indices])}

    def __getitem__(self, index: int) -> dict[str, Any]:
        pytest.fail("a batch is read by one call")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other


def loader_of(data: Any, **more: Any) -> ShardedLoader:
    return ShardedLoader(data, **{"micro_batch": 3, "rank": 1, "size": 2} | more)


@ways
@pytest.mark.parametrize("kind", [Mixed, Several, Whole])
def test_batches_are_the_same_in_every_way(kind: type[Mixed], way: dict[str, Any]) -> None:
    plain = loader_of(kind(), prefetch=0)
    loader = loader_of(kind(), **way)
    for _ in range(2):
        expected, found = list(plain), list(loader)
        assert len(expected) == 7
        assert same(found, expected)
        assert loader.state_dict() == plain.state_dict()
    loader.close()


def test_a_whole_batch_is_one_call_and_is_not_collated() -> None:
    data = Whole()
    list(loader_of(data))
    assert data.calls == 7
    several = Several()
    list(loader_of(several))
    assert several.calls == 7 * (1 + 3)


@ways
def test_a_batch_counts_when_it_is_handed_out(way: dict[str, Any]) -> None:
    loader = loader_of(range(40), collate_fn=list, **way)
    batches = iter(loader)
    for step in range(1, 5):
        next(batches)
        assert loader.state_dict()["position"] == 6 * step
    state = loader.state_dict()
    rest = list(batches)
    fresh = loader_of(range(40), collate_fn=list)
    fresh.load_state_dict(state)
    assert list(fresh) == rest
    assert loader.position == fresh.position == 40
    loader.close()


@ways
def test_loads_breaks_and_ends_within_a_pass(way: dict[str, Any]) -> None:
    """The same in every way, also where batches ahead are thrown away."""
    found = []
    for each in ({}, way):
        loader = loader_of(range(40), collate_fn=list, **each)
        seen, endless = [], RepeatingLoader(loader)
        start = loader.state_dict()
        seen += [next(endless) for _ in range(3)]
        loader.load_state_dict(start)
        seen += [next(endless) for _ in range(9)]
        loader.close()
        seen += [next(endless), loader.position]
        del endless
        for batch in loader:
            seen.append(batch)
            break
        seen += [list(loader), loader.position, loader.epoch]
        loader.close()
        found.append(seen)
    assert found[0] == found[1]


@pytest.mark.parametrize("way", [{"prefetch": 3}, {"workers": 2}], ids=str)
def test_what_is_not_used_up_is_ended_with_its_iterator(way: dict[str, Any]) -> None:
    loader = loader_of(range(400), collate_fn=list, **way)
    batches = iter(loader)
    next(batches)
    assert [t.name for t in threading.enumerate() if t.name.startswith("mpispeed-data")] == ["mpispeed-data"]
    assert len(multiprocessing.active_children()) == way.get("workers", 0)
    del batches


def test_workers_stay_or_go() -> None:
    def pids(loader: ShardedLoader) -> set[int]:
        return set(torch.cat(list(loader)).tolist())

    class Pids(Mixed):
        def __getitem__(self, index: int) -> int:
            return multiprocessing.current_process().pid

    going, staying = (loader_of(Pids(), workers=2, persistent_workers=stays) for stays in (False, True))
    assert pids(staying) == pids(staying)
    assert pids(going).isdisjoint(pids(going))
    assert len(pids(staying)) == 2
    staying.close()


class Dice(Mixed):
    """Samples of random numbers of all global generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand()), index])


def test_random_numbers_in_workers_belong_to_the_sample() -> None:
    found = []
    for size, workers in ((1, 1), (2, 3), (3, 2)):
        loaders = [
            ShardedLoader(Dice(24), micro_batch=12 // size, rank=rank, size=size, workers=workers)
            for rank in range(size)
        ]
        state = {**loaders[0].state_dict(), "position": 24 * 4 + 12, "epoch": 4}
        for loader in loaders:
            loader.load_state_dict(state)
        found.append(torch.cat([torch.cat(list(loader)) for loader in loaders]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len(set(found[0][:, :3].flatten().tolist())) == 36
    assert not torch.equal(next(iter(loader)), found[0][:4]), "another epoch has other numbers"


class Stream(IterableDataset):
    """Numbers, with a place of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 24:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_that_is_read_ahead_saves_its_place_of_the_batch_before() -> None:
    loader = ShardedLoader(Stream(), micro_batch=4, rank=0, size=1, collate_fn=list, prefetch=3)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    time.sleep(0.05)  # the thread is ahead by now
    state = loader.state_dict()
    assert state == {"position": 8, "epoch": 0, "dataset": {"at": 8}}
    next(batches)
    loader.load_state_dict(state)
    assert next(batches) == [8, 9, 10, 11]
    assert list(batches)[-1] == [20, 21, 22, 23]
    assert loader.state_dict() == {"position": 0, "epoch": 1, "dataset": {"at": 0}}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_streams_are_the_same_in_every_way(way: dict[str, Any]) -> None:
    class Plain(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from range(23)

    plain, loader = (
        ShardedLoader(Plain(), micro_batch=4, rank=1, size=2, collate_fn=list, **each)
        for each in ({}, {**way, "workers": min(1, way.get("workers", 0))})
    )
    for _ in range(2):
        assert list(loader) == list(plain) == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 16]]
    loader.close()


def test_workers_that_stay_follow_a_stream_to_its_place() -> None:
    """Of a checkpoint without workers, which has the place of the data set itself."""
    ways = [{}, {"workers": 1, "persistent_workers": True}]
    plain, loader = (ShardedLoader(Stream(), micro_batch=4, rank=0, size=1, collate_fn=list, **way) for way in ways)
    batches = iter(plain)
    next(batches), next(batches)
    state = plain.state_dict()
    assert state["dataset"] == {"at": 8}
    assert len(list(loader)) == 6
    loader.load_state_dict(state)
    assert list(loader) == list(batches)
    loader.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_empty_arrays_travel(way: dict[str, Any]) -> None:
    data = [np.zeros((0, 2), np.float32) for _ in range(6)]
    loader = loader_of(data, collate_fn=list, **way)
    ((first, *_),) = list(loader)
    assert (first.shape, first.dtype) == ((0, 2), np.float32)
    loader.close()


@pytest.mark.parametrize("size", [7, 30_000])
def test_many_indices_and_large_objects_do_not_block(size: int) -> None:
    """Requests and answers that are longer than what a socket holds."""
    data = ["x" * (1_000_000 // size)] * (4 * size)
    loader = ShardedLoader(data, micro_batch=size, rank=0, size=1, collate_fn=list, workers=2, prefetch=8)
    assert [len("".join(batch)) for batch in loader] == [1_000_000 // size * size] * 4


def test_a_thread_is_ahead_by_no_more_than_it_may() -> None:
    made = []

    def items(is_wanted: Any) -> Iterator[int]:
        for item in range(100):
            made.append(item)
            yield item

    ahead = Ahead(items, 3)
    assert [next(ahead), next(ahead)] == [0, 1]
    while len(made) < 6:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(made) == 6  # two used, three that wait, one in its hands
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)
