"""The clock that passes of an engine are timed by: the host's, or marks on the stream of a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, SupportsFloat

import torch

from mpispeed.base.device import current_stream, module_of


class Clock:
    """Marks of moments, and who is told when a pass begins. One object is shared by all parts of an engine.

    It costs what `time.perf_counter` costs until somebody measures a device, or wants to know what begins.

    Attributes:
        now: gives a mark of this moment; the difference of two marks is a number of seconds, or becomes one by `float`.
        is_of_host: marks are those of `time.perf_counter`.
        entering: is told the name of a backward pass, or of a part of a step, that begins; None: nobody wants to know.
    """

    __slots__ = ("_listeners", "entering", "is_of_host", "now")

    def __init__(self) -> None:
        self._listeners: list[Callable[[str], None]] = []
        self.now: Callable[[], Any] = time.perf_counter
        self.is_of_host = True
        self.entering: Callable[[str], None] | None = None

    def measure(self, device: torch.device) -> None:
        """Measure what `device` does from now on, rather than how long the host takes to ask for it."""
        if device.type != "cpu":
            self.now, self.is_of_host = lambda: DeviceMark(device), False

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Tell `listener`, too, what begins, from now on; returns what ends that."""
        self._listeners.append(listener)
        self.entering = self._tell

        def end() -> None:
            self._listeners.remove(listener)
            self.entering = self._tell if self._listeners else None

        return end

    def _tell(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)


class DeviceMark:
    """A moment in the work that this thread has queued for a device."""

    __slots__ = ("event",)

    def __init__(self, device: torch.device) -> None:
        """Queue the mark; the host does not wait."""
        self.event = module_of(device).Event(enable_timing=True)
        self.event.record(current_stream(device))

    def __sub__(self, begin: DeviceMark) -> Elapsed:
        return Elapsed(begin, self)


class Elapsed:
    """The time between two marks; `float` gives seconds, and waits until the device has passed the second mark."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: DeviceMark, end: DeviceMark) -> None:
        self._begin, self._end = begin, end

    def __float__(self) -> float:
        self._end.event.synchronize()
        milliseconds: float = self._begin.event.elapsed_time(self._end.event)
        return 1e-3 * milliseconds


class Both:
    """A context in two others."""

    def __init__(self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        self._outer.__exit__(kind, error, trace)


class Stopwatch:
    """Sums the times of blocks of code: `with stopwatch: ...`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: Any = None
        self._laps: list[SupportsFloat] = []

    def __enter__(self) -> None:
        self._began = self._clock.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._laps.append(self._clock.now() - self._began)

    def take(self) -> list[SupportsFloat]:
        """The times of the blocks since the last call; `float` of one gives seconds, and may wait for a device."""
        laps, self._laps = self._laps, []
        return laps
