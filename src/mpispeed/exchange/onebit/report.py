"""Reports of 1-bit optimizers: phase, traffic and quantization error; a warning of an early freeze."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.events import Bus, Event
from mpispeed.base.units import format_bytes
from mpispeed.exchange.onebit.plan import PHASES
from mpispeed.native.reduce import square_partials

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.exchange.onebit.updates import OneBitUpdates

log = logging.getLogger(__name__)

SETTLED = 0.96
"""Least ratio of the variance's 1-norms, 1 / (1 - beta2) updates apart, at which it counts as settled.

Source: 1-bit Adam (arXiv 2102.02888), on the length of the warm-up.
"""


class OneBitReport:
    """Announces `Event.CODED` after every applied step, and logs it every `every` steps; on rank 0."""

    def __init__(self, onebit: OneBitUpdates, every: int | None) -> None:
        self._onebit, self._every = onebit, every

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps."""
        self._bus = bus
        bus.subscribe(Event.STEP_END, self._on_step)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        step = event["global_step"]
        is_logged = bool(self._every) and step % (self._every or 1) == 0
        if event["skipped"] or not (is_logged or self._bus.has(Event.CODED)):
            return
        onebit, coder = self._onebit, self._onebit.coder
        kind, norm = onebit.kind(onebit.step), error_norm(onebit)
        self._bus.announce(
            Event.CODED,
            global_step=step,
            samples=event["samples"],
            phase=kind.name,
            series={
                "onebit_sent_bytes": coder.sent,
                "onebit_saved_bytes": coder.plain - coder.sent,
                "onebit_error_norm": norm,
            },
        )
        if is_logged:
            log.info(
                "1-bit | %s: sent %s, saved %s of fp32 sums; norm of what coding left out %.3g",
                PHASES[kind], format_bytes(coder.sent), format_bytes(coder.plain - coder.sent), norm,
            )  # fmt: skip


def error_norm(onebit: OneBitUpdates) -> float:
    """2-norm of this rank's worker errors over all units; 0 before the first exchange. Local."""
    squares = [math.fsum(square_partials(errors.worker)) for errors in onebit.coder.errors.values()]
    return math.sqrt(math.fsum(squares))


class FreezeWatch:
    """Warns if the variance is frozen while it still changes; judged by rank 0's part of the model."""

    def __init__(self, onebit: OneBitUpdates, freeze_step: int) -> None:
        """Args: `freeze_step`: number of the last update of the variance."""
        self._onebit, self._last = onebit, freeze_step
        beta2 = float(onebit.groups[0]["betas"][1])
        self._first = max(1, freeze_step - round(1.0 / (1.0 - beta2)))
        self._before = 0.0

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps."""
        bus.subscribe(Event.STEP_END, self._on_step)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        update = self._onebit.step
        if event["skipped"] or update not in (self._first, self._last):
            return
        size = self._size()
        if update == self._last and self._first < self._last and self._before > 0.0 and size > 0.0:
            ratio = min(size, self._before) / max(size, self._before)
            if ratio < SETTLED:
                log.warning(
                    "the variance is frozen at update %d, and its 1-norm %s %.3g times within the last %d updates "
                    "(settled: within %.2f): a longer warm-up (15 to 25 %% of all updates) is safer",
                    self._last, "grew" if size > self._before else "shrank", max(size, self._before) /
                    min(size, self._before), self._last - self._first, 1.0 / SETTLED,
                )  # fmt: skip
        self._before = size

    def _size(self) -> float:
        states, units = self._onebit.states, self._onebit.params.table.units
        return math.fsum(float(states.of(unit)["exp_avg_sq"].sum(dtype=torch.float64)) for unit in units)


def watch(onebit: OneBitUpdates, bus: Bus, every: int | None) -> None:
    """Attach the report and the freeze warning; called on rank 0."""
    OneBitReport(onebit, every).attach(bus)
    freeze = getattr(onebit.rule, "freeze_step", None) or onebit.rule.intervals.var_freeze_step
    FreezeWatch(onebit, freeze).attach(bus)
    table = onebit.params.table
    if table.shards_masters:
        size = sum(unit.layout.padded * unit.states.compute.itemsize for unit in table.units)
        log.info("1-bit | masters are cut over ranks: besides the coded momenta, parameters of %s are gathered in "
                 "every step", format_bytes(size))  # fmt: skip
