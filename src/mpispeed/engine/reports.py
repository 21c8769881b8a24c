"""What rank 0 logs of a run: progress, times, bytes and traffic, each switched on by its config key."""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING, Any

from mpispeed.base.events import Bus, Event
from mpispeed.base.units import format_bytes, format_duration
from mpispeed.engine import queries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.engine.parts import Parts
    from mpispeed.mesh.journal import Journal

log = logging.getLogger(__name__)


class Progress:
    """The progress line that DeepSpeed users know: before the first step and every `steps_per_print` steps."""

    def __init__(self, parts: Parts, every: int) -> None:
        self._parts, self._every = parts, every

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps."""
        log.info("%s", self._head())
        bus.subscribe(Event.STEP_END, self._on_step)

    def _head(self) -> str:
        counters, optimization = self._parts.counters, self._parts.optimization
        rates, momenta = queries.group_values(optimization, "lr", 0.0), queries.momenta(optimization)
        return f"step={counters.global_steps}, skipped={counters.skipped_steps}, lr={rates}, mom={momenta}"

    def _on_step(self, event: Mapping[str, Any]) -> None:
        if event["global_step"] % self._every == 0:
            log.info(
                "%s, loss=%.4f, norm=%.3f, time=%s",
                self._head(),
                event["loss"],
                event["norm"],
                format_duration(event["seconds"]),
            )


class Timings:
    """`wall_clock_breakdown`: forward, backward and step of each global step, in milliseconds of this rank."""

    def __init__(self) -> None:
        self._seconds = {"fwd": 0.0, "bwd": 0.0}

    def attach(self, bus: Bus) -> None:
        """Listen to the ends of forward, backward and step."""
        bus.subscribe(Event.FORWARD_END, lambda event: self._add("fwd", event))
        bus.subscribe(Event.BACKWARD_END, lambda event: self._add("bwd", event))
        bus.subscribe(Event.STEP_END, self._on_step)

    def _add(self, name: str, event: Mapping[str, Any]) -> None:
        self._seconds[name] += event["seconds"]

    def _on_step(self, event: Mapping[str, Any]) -> None:
        rows = {**self._seconds, "step": event["update_seconds"]}
        log.info("time (ms) | %s", " | ".join(f"{name}: {1000 * seconds:.2f}" for name, seconds in rows.items()))
        self._seconds = {"fwd": 0.0, "bwd": 0.0}


class Traffic:
    """`comms_logger`: count, bytes and time per verb and axes when the run ends."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def attach(self, bus: Bus) -> None:
        """Listen to the end of the run."""
        bus.subscribe(Event.CLOSE, self._on_close)

    def _on_close(self, event: Mapping[str, Any]) -> None:
        for (verb, axes), entry in sorted(self._journal.entries().items()):
            where = ",".join(axes) or "all"
            log.info("%-16s over %-10s %8d calls %10s  %s", verb, where, entry.count, format_bytes(entry.bytes),
                     format_duration(entry.seconds))  # fmt: skip


def report_memory(parts: Parts) -> None:
    """`memory_breakdown`: bytes of each kind of model state on rank 0, and the process's peak."""
    rows = {"parameters": parts.params.param_bytes, "masters": parts.params.master_bytes}
    if parts.optimization is not None:
        rows["gradients"] = parts.optimization.grads.rest_bytes
        rows["optimizer state"] = parts.optimization.states.state_bytes
    rows["peak resident"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log.info("memory | %s", " | ".join(f"{name}: {format_bytes(size)}" for name, size in rows.items()))


def observe(parts: Parts) -> None:
    """Attach what the config asks for; call on rank 0."""
    config = parts.plan.config
    if parts.plan.steps_per_print:
        Progress(parts, parts.plan.steps_per_print).attach(parts.bus)
    if config.wall_clock_breakdown:
        Timings().attach(parts.bus)
    if config.comms_logger.enabled:
        Traffic(parts.mesh.journal).attach(parts.bus)
    if config.memory_breakdown:
        report_memory(parts)
        parts.bus.subscribe(Event.STEP_END, lambda _: report_memory(parts))
    if config.dump_state:
        log.info("config | %s", config.model_dump_json())
