"""Log of a run on rank 0: progress, times, bytes and traffic, each switched on by its config key."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpispeed import monitor
from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Bus, Event
from mpispeed.base.units import format_bytes, format_duration
from mpispeed.config.derive import measures_wall_clock
from mpispeed.config.ineffective import OF_DEVICES
from mpispeed.config.monitor import MonitorConfig
from mpispeed.engine.delegation import momenta
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.observe.memory import PassMemory, report_memory
from mpispeed.engine.observe.throughput import Speed
from mpispeed.engine.observe.times import Times
from mpispeed.engine.step import Place
from mpispeed.mesh import comms_log
from mpispeed.monitor import step_times
from mpispeed.monitor.by_hand import Monitors, Throughput
from mpispeed.pipe.module import PipelineModule
from mpispeed.pipe.timeline import expected_bubble

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.engine.build.parts import Parts
    from mpispeed.mesh.collectives.group import CommTrace
    from mpispeed.native.block_io import BlockIO
    from mpispeed.pipe.schedule import PipeSchedule

log = logging.getLogger(__name__)


class Progress:
    """DeepSpeed's progress line, before the first step and every `steps_per_print` steps."""

    def __init__(self, parts: Parts, every: int) -> None:
        self._parts, self._every = parts, every

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps."""
        log.info("%s", self._head())
        bus.subscribe(Event.STEP_END, self._on_step)

    def _head(self) -> str:
        counters, rates, moments = self._parts.counters, self._parts.updates.rates(), momenta(self._parts)
        return f"step={counters.global_steps}, skipped={counters.skipped_steps}, lr={rates}, mom={moments}"

    def _on_step(self, event: Mapping[str, Any]) -> None:
        if event["global_step"] % self._every == 0:
            log.info(
                "%s, loss=%s, norm=%.3f, time=%s",
                self._head(),
                "unknown" if event["loss"] is None else format(event["loss"], ".4f"),
                event["norm"],
                format_duration(event["seconds"]),
            )


def attach(context: Context) -> Hooks:
    """Attach monitors on every rank (they write on rank 0 only) and the log on rank 0.

    Raises:
        ConfigError: a monitor cannot make its folder or files.
    """
    parts, throughput = context.parts, Throughput()
    if parts.plan.config.timers.throughput.enabled:
        throughput.attach(parts.bus)
    monitors = _attach_monitors(parts)
    hooks = Hooks(published={"monitor": monitors, "tput_timer": throughput})
    start_comms_log(parts)
    if parts.mesh.rank == 0:
        for warning in context.given.warnings:
            if parts.plan.device.type == "cpu" or not any(reason in warning for reason in OF_DEVICES):
                log.warning("%s", warning)
        for row in parts.plan.describe():
            log.info("%-10s %s", *row)
        observe(parts, throughput)
        if measures_wall_clock(parts.plan.config):
            return replace(hooks, **time_passes(parts))
    return hooks


def time_passes(parts: Parts) -> dict[str, Any]:
    """`wall_clock_breakdown`: measure passes from now on; returns what the row of features calls for it."""
    is_pipeline = isinstance(parts.module, PipelineModule)
    parts.clock.measure(parts.plan.device)
    times = Times(parts.bus, parts.clock, has_micro_steps=not is_pipeline)
    times.attach()
    if parts.optimization is not None and parts.mesh["data"].size > 1:
        parts.optimization.grads.time_sums(times.sums)
    return {
        "step_parts": [(Place.START, times.begin_step)], "after_step": None if is_pipeline else times.end_micro_step
    }  # fmt: skip


def _attach_monitors(parts: Parts) -> Monitors:
    sections = MonitorConfig.of(parts.plan.config).sections()
    enabled = ", ".join(name for name, section in sections.items() if section["enabled"])
    try:
        sinks = monitor.build(sections, parts.mesh.rank)
    except OSError as error:
        msg = f"a monitor of the config ({enabled}) cannot write: {error}; correct its output_path or disable it"
        raise ConfigError(msg) from error
    monitor.attach(parts.bus, sinks)
    return Monitors(sinks, enabled=bool(enabled))


def start_comms_log(parts: Parts) -> None:
    """`comms_logger`: record from now until the engine closes, on every rank."""
    section, comms = parts.plan.config.comms_logger, comms_log.of_process()
    if not section.enabled:
        return
    if not comms.is_attached:
        comms.clear()
    comms.configure(section.model_dump())
    comms.attach(parts.mesh.world.comm_trace)
    parts.bus.subscribe(Event.CLOSE, lambda _: comms.detach())


class Traffic:
    """`comms_logger`'s tables at the end of a run: verbs by message size; count, bytes, time per verb and axes."""

    def __init__(self, comm_trace: CommTrace) -> None:
        self._comm_trace = comm_trace

    def attach(self, bus: Bus) -> None:
        """Listen to the end of the run."""
        bus.subscribe(Event.CLOSE, self._on_close)

    def _on_close(self, event: Mapping[str, Any]) -> None:
        log.info("communication of rank 0\n%s", comms_log.of_process().table())
        for (verb, axes), entry in sorted(self._comm_trace.entries().items()):
            where = ",".join(axes) or "all"
            log.info("%-16s over %-10s %8d calls %10s  %s", verb, where, entry.count, format_bytes(entry.bytes),
                     format_duration(entry.seconds))  # fmt: skip


class SwapTraffic:
    """Traffic of swap files: an event for each step and, with `comms_logger`, totals at the end of the run."""

    def __init__(self, io: BlockIO, *, is_logged: bool) -> None:
        self._io, self._is_logged = io, is_logged
        self._last, self._steps = io.counters, 0

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps and of the run."""
        self._bus = bus
        bus.subscribe(Event.STEP_END, self._on_step)
        if self._is_logged:
            bus.subscribe(Event.CLOSE, self._on_close)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        now, before = self._io.counters, self._last
        self._last, self._steps = now, self._steps + 1
        self._bus.announce(
            Event.SWAP,
            global_step=event["global_step"],
            bytes_read=now.bytes_read - before.bytes_read,
            requests_read=now.requests_read - before.requests_read,
            bytes_written=now.bytes_written - before.bytes_written,
            requests_written=now.requests_written - before.requests_written,
        )

    def _on_close(self, event: Mapping[str, Any]) -> None:
        total = self._io.counters
        for verb, count, size in (
            ("read", total.requests_read, total.bytes_read),
            ("write", total.requests_written, total.bytes_written),
        ):
            log.info("%-16s over %-10s %8d calls %10s  in %d steps", verb, "swap files", count, format_bytes(size),
                     self._steps)  # fmt: skip


def describe_pipeline(parts: Parts, schedule: PipeSchedule, name: str) -> list[tuple[str, str]]:
    """Rows (name, value) for the log at the start of a pipeline: its bubble, and memory spent to save traffic."""
    steps, stages, chunks = schedule.num_micro_batches, schedule.num_stages, schedule.num_chunks
    idle = expected_bubble(name, steps, stages, chunks)
    words = f"{name}, {steps} micro-batches over {stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
    if idle is not None:
        words += f", {100 * float(idle / (idle + 3 * steps)):.0f} % idle if stages are equal"
    rows = [("schedule", f"{words}; up to {schedule.num_pipe_buffers()} micro-batches held by this stage")]
    plan, optimization = parts.plan, parts.optimization
    if optimization is not None and plan.placing.sums_late:
        whole = optimization.grads.shards.rest_bytes
        extra = whole - whole // parts.mesh["data"].size
        text = f"gradients are summed once in a step, not for each micro-batch: {format_bytes(extra)} more on this rank"
        rows.append(("memory", text + "; pipeline.per_micro_batch saves them"))
    if plan.gathers_once:
        cut = [unit for unit in parts.table.all_units if not unit.states.param.is_replicated]
        extra = sum(unit.layout.padded * unit.states.compute.itemsize for unit in cut)
        if extra:
            rows.append(("memory", f"parameters are gathered once in a step: {format_bytes(extra)} while it runs"))
    return rows


def observe(parts: Parts, throughput: Throughput) -> None:
    """Attach the observers that the config switches on; called on rank 0."""
    config = parts.plan.config
    if parts.plan.steps_per_print:
        Progress(parts, parts.plan.steps_per_print).attach(parts.bus)
        if config.timers.throughput.enabled:
            Speed(parts, throughput, parts.plan.steps_per_print).attach(parts.bus)
    if config.comms_logger.enabled:
        Traffic(parts.mesh.comm_trace).attach(parts.bus)
    io = parts.params.tiers.io
    if io is not None:
        SwapTraffic(io, is_logged=config.comms_logger.enabled).attach(parts.bus)
    if parts.optimization is not None:
        parts.optimization.exchange.watch(parts.bus, parts.plan.steps_per_print)
    if config.memory_breakdown:
        report_memory(parts)
        PassMemory().attach(parts.bus)
        parts.bus.subscribe(Event.STEP_END, lambda _: report_memory(parts))
    if config.dump_state:
        log.info("config | %s", config.model_dump_json())
    step_times.watch(parts.bus, ranks=parts.plan.world_size, samples_per_step=parts.plan.batch.train_batch_size)
