"""Monitors as scripts use them: points of series of their own, and the average throughput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpispeed.base.events import Event

if TYPE_CHECKING:
    from mpispeed.base.events import Bus
    from mpispeed.monitor.sink import Sink

WARM_UP_STEPS = 2
"""First steps of a process, which the average leaves out."""


class Monitors:
    """The monitors of an engine.

    Attributes:
        enabled: the config has one, the same on all ranks; rank 0 alone writes.
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, enabled: bool = False) -> None:
        self._sinks, self.enabled = list(sinks), enabled

    def add(self, sink: Sink | None) -> None:
        """Add a monitor, the same on all ranks; the sink is None on those that do not write."""
        self.enabled = True
        if sink is not None:
            self._sinks.append(sink)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]], flush: bool = True) -> None:
        """Write points of series: (name, value, samples or steps). Local; ranks other than 0 write nothing."""
        points = list(event_list) if self._sinks else []
        for sink in self._sinks:
            for series, value, x in points:
                sink.write(series, float(value), int(x))
            if flush:
                sink.flush()


class Throughput:
    """Samples per second of the steps that a bus announces."""

    def __init__(self) -> None:
        self.global_step_count = 0  # steps of this process
        self.total_elapsed_time = 0.0  # seconds of the steps after the warm-up
        self._first_samples = self._last_samples = 0

    def attach(self, bus: Bus) -> None:
        """Listen to steps."""
        bus.subscribe(Event.STEP_END, self._on_step)

    def avg_samples_per_sec(self) -> float:
        """Mean over all ranks' samples since the warm-up; minus infinity before its end, as in DeepSpeed."""
        if not self.total_elapsed_time:
            return float("-inf")
        return (self._last_samples - self._first_samples) / self.total_elapsed_time

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self.global_step_count += 1
        self._last_samples = event["samples"]
        if self.global_step_count <= WARM_UP_STEPS:
            self._first_samples = event["samples"]
        else:
            self.total_elapsed_time += event["seconds"]
