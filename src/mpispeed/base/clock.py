"""Named wall-clock timers. They never synchronise ranks or devices: measuring must not change the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Timer:
    """Accumulated time of one name."""

    seconds: float = 0.0
    count: int = 0


class Clock:
    """Timers by name; `lap` reads and clears them."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to timer `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            timer = self._timers.setdefault(name, Timer())
            timer.seconds += time.perf_counter() - start
            timer.count += 1

    def lap(self) -> dict[str, float]:
        """Seconds by name since the last lap, in the order of first use."""
        seconds = {name: timer.seconds for name, timer in self._timers.items()}
        self._timers.clear()
        return seconds
