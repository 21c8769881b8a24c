"""`wall_clock_breakdown`: times of forward and backward passes and of updates, for the log and for monitors.

Source: DeepSpeed's documentation, "Monitoring Module": the series elapsed_time_ms_*, and its lines of timers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat

from mpispeed.base.clock import Stopwatch
from mpispeed.base.events import Event

if TYPE_CHECKING:
    from mpispeed.base.clock import Clock
    from mpispeed.base.events import Bus
    from mpispeed.engine.step import StepContext

log = logging.getLogger(__name__)

_NAMES = {"fwd": "forward", "bwd": "backward", "bwd_inner": "backward_inner", "bwd_allreduce": "backward_allreduce",
          "step": "step"}  # fmt: skip
"""DeepSpeed's names of timers in the log, and of its series in monitors."""


class Times:
    """Times of this rank, in one line for each micro-step and one for each global step.

    Sums of gradients belong to the backward pass, as in DeepSpeed, also where the step waits for what is left of them.
    Forward passes of evaluations are left out.
    """

    def __init__(self, bus: Bus, clock: Clock, *, has_micro_steps: bool) -> None:
        """Args: without micro-steps of their own, as in a pipeline, there are no lines for them."""
        self.sums = Stopwatch(clock)
        self._bus, self._has_micro_steps = bus, has_micro_steps
        self._is_training, self._has_stepped = True, False
        self._forward: list[SupportsFloat] = []
        self._backward: list[SupportsFloat] = []
        self._within: list[SupportsFloat] = []  # sums inside of backward passes
        self._behind: list[SupportsFloat] = []  # sums after them
        self._total = dict.fromkeys(_NAMES.values(), 0.0)

    def attach(self) -> None:
        """Listen to passes and updates."""
        self._bus.subscribe(Event.BATCH_START, self._on_batch)
        self._bus.subscribe(Event.FORWARD_END, self._on_forward)
        self._bus.subscribe(Event.BACKWARD_END, self._on_backward)
        self._bus.subscribe(Event.STEP_END, self._on_step)

    def begin_step(self, _: StepContext) -> None:
        """Note what was waited for between the last pass and the step; a part of a step, at its start."""
        self._behind += self.sums.take()

    def end_micro_step(self) -> None:
        """Write the line of a micro-step that ended without an update; called at the end of `engine.step()`."""
        if not self._has_stepped:
            self._behind += self.sums.take()
            self._end_micro_step()
        self._has_stepped = False

    def _on_batch(self, event: Mapping[str, Any]) -> None:
        self._is_training = event["is_training"]

    def _on_forward(self, event: Mapping[str, Any]) -> None:
        if self._is_training:
            self._forward.append(event["seconds"])

    def _on_backward(self, event: Mapping[str, Any]) -> None:
        self._backward.append(event["seconds"])
        self._within += self.sums.take()

    def _end_micro_step(self, step: float = 0.0) -> None:
        """Add up the times and write the line; may wait for a device."""
        inner = _sum(self._backward) - (within := _sum(self._within))
        sums = within + _sum(self._behind)
        found = dict(zip(_NAMES.values(), (_sum(self._forward), inner + sums, inner, sums, step), strict=True))
        self._forward, self._backward, self._within, self._behind = [], [], [], []
        for name, seconds in found.items():
            self._total[name] += seconds
        if self._has_micro_steps:
            log.info("%s", _line(found, "_microstep"))

    def _on_step(self, event: Mapping[str, Any]) -> None:
        late = self.sums.take()
        self._behind += late
        self._end_micro_step(event["update_seconds"] - _sum(late))
        self._has_stepped = True
        total, self._total = self._total, dict.fromkeys(_NAMES.values(), 0.0)
        self._bus.announce(Event.TIMES, global_step=event["global_step"], samples=event["samples"], series=total)
        log.info("%s", _line(total))


def _sum(times: Iterable[SupportsFloat]) -> float:
    return sum(map(float, times))


def _line(seconds: Mapping[str, float], suffix: str = "") -> str:
    columns = (f"{short}{suffix}: {1000 * seconds[name]:.2f}" for short, name in _NAMES.items())
    return f"time (ms) | {' | '.join(columns)}"
