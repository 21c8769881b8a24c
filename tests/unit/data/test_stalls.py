"""Stalls: windows of steps, the rank that waits longest, and how rarely it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from mpispeed.data.stalls import Stall, StallWatch, Waits


def numbers(waits: list[float], seconds: float) -> torch.Tensor:
    return torch.tensor([[wait, seconds] for wait in waits], dtype=torch.float64)


def stalls_of(watch: StallWatch, steps: range, waits: list[float], seconds: float = 0.1) -> list[Stall]:
    found = [watch.add(step, numbers(waits, seconds)) for step in steps]
    return [stall for stall in found if stall is not None]


def test_the_first_step_is_left_out_and_the_slowest_rank_is_named() -> None:
    watch = StallWatch(0.1, window=50)
    watch.add(120, numbers([9.0] * 4, 9.0))
    (stall,) = stalls_of(watch, range(121, 171), [0.0, 0.001, 0.02, 0.041], 0.130)
    assert (stall.first, stall.last, stall.rank) == (121, 170, 3)
    assert stall.share == pytest.approx(0.041 / 0.130)
    assert str(stall) == "data stalled steps 121 to 170 on rank 3: 41 ms of 130 ms per step (32 %)"


def test_short_waits_are_no_stall() -> None:
    watch = StallWatch(0.1, window=10)
    assert stalls_of(watch, range(1, 200), [0.0099]) == []
    assert stalls_of(watch, range(200, 300), [0.0101])


def test_a_window_counts_the_whole_of_its_waits() -> None:
    """One long wait in a window is as bad as many short ones."""
    watch = StallWatch(0.1, window=10)
    found = [watch.add(step, numbers([0.2 if step == 7 else 0.0], 0.1)) for step in range(1, 12)]
    assert [stall for stall in found if stall] == [Stall(2, 11, 0, pytest.approx(0.02), pytest.approx(0.1))]


def test_it_is_told_once_and_then_rarely() -> None:
    told = [stall.last for stall in stalls_of(StallWatch(0.1, window=10, pause=100), range(1, 1002), [0.05])]
    assert told == [11, 111, 311, 711]


def test_waits_are_measured_from_wish_to_arrival() -> None:
    def slow() -> Iterator[int]:
        for item in range(3):
            time.sleep(0.02)
            yield item

    waits = Waits()
    assert not waits.is_used
    for _ in waits.timed(slow()):
        time.sleep(0.05)  # what is done with a batch does not count
    assert waits.is_used
    seconds = waits.take()
    assert seconds >= 0.06
    assert waits.take() == 0.0
