"""Stalls: how long steps wait for data, and when that is worth a warning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


class Waits:
    """Time that this process has waited for batches of its loaders.

    Attributes:
        seconds: since the last `take`.
        is_used: a loader has waited, or not had to.
    """

    def __init__(self) -> None:
        self.seconds, self.is_used = 0.0, False

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; the time from the wish for one to its arrival is counted."""
        self.is_used = True
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - begin
            yield batch

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass(frozen=True, slots=True)
class Stall:
    """Steps that waited for data.

    Attributes:
        first, last: numbers of the steps.
        rank: the one that waited longest.
        wait_seconds, step_seconds: of that rank, per step.
    """

    first: int
    last: int
    rank: int
    wait_seconds: float
    step_seconds: float

    @property
    def share(self) -> float:
        """Part of the time of a step."""
        return self.wait_seconds / self.step_seconds if self.step_seconds else 0.0

    def __str__(self) -> str:
        return (
            f"data stalled steps {self.first} to {self.last} on rank {self.rank}: {1000 * self.wait_seconds:.0f} ms of "
            f"{1000 * self.step_seconds:.0f} ms per step ({100 * self.share:.0f} %)"
        )


class StallWatch:
    """Looks at the waits of all ranks in windows of steps; tells of the first stalled one, then rarely."""

    def __init__(self, share: float, window: int = 50, pause: int = 1000) -> None:
        """Prepare.

        Args:
            share: of the time of a step, from which a rank is stalled.
            window: steps that are looked at together.
            pause: steps until the next telling, doubled each time.
        """
        self._share, self._window, self._pause = share, window, pause
        self._first: int | None = None
        self._sums = torch.zeros(0, 2, dtype=torch.float64)
        self._quiet_until = 0

    def add(self, step: int, numbers: torch.Tensor) -> Stall | None:
        """Count a step; returns a stall that is to be told.

        Args:
            step: its number.
            numbers: [ranks, 2] seconds that each rank waited for the data of this step, and of its whole step.
        """
        if self._first is None or len(self._sums) != len(numbers):
            # Of the first step: workers start, files are opened.
            self._first, self._sums = step + 1, torch.zeros(len(numbers), 2, dtype=torch.float64)
            return None
        self._sums += numbers
        steps = step - self._first + 1
        if steps < self._window:
            return None
        rank = int(self._sums[:, 0].argmax())
        wait, whole = (self._sums[rank] / steps).tolist()
        stall = Stall(self._first, step, rank, wait, whole)
        self._first, self._sums = step + 1, torch.zeros_like(self._sums)
        if stall.share < self._share or step < self._quiet_until:
            return None
        self._quiet_until, self._pause = step + self._pause, 2 * self._pause
        return stall
