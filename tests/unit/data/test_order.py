"""Orders of batches: a loader follows any order, which is a pure function of a place."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.data import EpochOrder, RepeatingLoader, SampleOrder, ShardedLoader


class Growing:
    """Two ranks of micro-batch 2 that see samples below a limit, which grows with the position."""

    length = 24

    def __init__(self, rank: int, start: int = 4) -> None:
        self.rank, self.start = rank, start

    def count(self, epoch: int, offset: int) -> int:
        return (self.length - offset) // 4

    def batches(self, epoch: int, offset: int) -> Iterator[list[int]]:
        for place in range(offset, self.length, 4):
            first = place + 2 * self.rank
            yield [(epoch + index) % self.limit(place) for index in (first, first + 1)]

    def limit(self, offset: int) -> int:
        return self.start + offset // 4

    def state_dict(self, position: int) -> dict[str, Any]:
        return {"limit": self.limit(position % self.length), "start": self.start}

    def check_state(self, state: Mapping[str, Any]) -> None:
        if "start" not in state:
            msg = "no state of a growing order"
            raise ConfigError(msg)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = state["start"]


def growing(rank: int = 0, **settings: Any) -> ShardedLoader:
    return ShardedLoader(
        range(30), micro_batch=2, rank=rank, size=2, collate_fn=list, order=Growing(rank, **settings)  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_loader_follows_an_order_of_its_own() -> None:
    loaders = [growing(rank) for rank in range(2)]
    passes = [list(loader) for loader in loaders]
    assert passes == [list(Growing(rank).batches(0, 0)) for rank in range(2)]
    assert passes[0][2:4] == [[2, 3], [5, 6]]
    assert [(len(loader), loader.position, loader.epoch) for loader in loaders] == [(6, 24, 1)] * 2
    assert list(loaders[0]) == list(Growing(0).batches(1, 0))


def test_passes_after_the_end_leave_the_position_there() -> None:
    """A run may be saved at its end, and go on from there with more passes over the data."""
    order = EpochOrder(
        SampleOrder(12, 3, shuffle=True), micro_batch=2, rank=0, size=2, unit=4, drop_last=False, epochs=2
    )
    loader = ShardedLoader(range(12), micro_batch=2, rank=0, size=2, collate_fn=list, order=order)
    assert [len(list(loader)) for _ in range(5)] == [3, 3, 0, 0, 0]
    assert (loader.position, loader.epoch, len(loader)) == (24, 2, 0)
    with pytest.raises(StopIteration):
        next(RepeatingLoader(loader))
    assert loader.state_dict()["position"] == 24


def test_its_state_travels_with_the_position() -> None:
    loader = growing(start=3)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert state == {"position": 8, "epoch": 0, "limit": 5, "start": 3}
    assert loader.state_dict(unused_batches=1) == {"position": 4, "epoch": 0, "limit": 4, "start": 3}
    again = growing(start=9)
    again.load_state_dict(state)
    assert list(again) == list(batches)
    with pytest.raises(ConfigError, match="growing order"):
        again.load_state_dict({"position": 0, "epoch": 0})


def test_functions_of_batches_see_the_state_after_them() -> None:
    loader = growing()
    seen = []
    loader.post_process_func = lambda batch, state: seen.append(state["limit"]) or batch
    batches = iter(loader)
    next(batches), next(batches)
    assert seen == [5, 6]


def test_the_order_of_epochs_is_pure() -> None:
    order = EpochOrder(SampleOrder(10, 3, shuffle=True), micro_batch=2, rank=1, size=2, unit=4, drop_last=False)
    first = list(order.batches(1, 4))
    list(order.batches(0, 0))
    assert list(order.batches(1, 4)) == first
    assert (order.count(1, 4), order.count(0, 0), order.count(0, 12)) == (2, 3, 0)
