"""The section `trace`: what all ranks do when, in a few steps; and NVTX ranges of passes on GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.config.derive import measures_wall_clock
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.observe.passes import Passes
from mpispeed.engine.observe.spans import Spans, Waits, bring, packed
from mpispeed.mesh.clocks import measure_offset
from mpispeed.native.block_io import Moved
from mpispeed.record.chrome import write_chrome

log = logging.getLogger(__name__)


def attach(context: Context) -> Hooks | None:
    """Trace the steps that the section names; where the device is a GPU, also NVTX ranges of passes.

    Collective over: all ranks.

    Raises:
        ConfigError: the folder of `trace.path` does not exist.
    """
    settings, parts = context.settings, context.parts
    if parts.plan.device.type == "cuda" and (settings.enabled or measures_wall_clock(parts.plan.config)):
        nvtx = torch.cuda.nvtx
        Passes(nvtx.range_start, lambda _, token: nvtx.range_end(token)).attach(parts.clock, parts.bus)
    if not settings.enabled:
        return None
    if settings.path is not None and parts.mesh.rank == 0 and not Path(settings.path).absolute().parent.is_dir():
        folder = Path(settings.path).absolute().parent
        msg = f"trace.path {settings.path}: there is no folder {folder}; make it, or name another file"
        raise ConfigError(msg)
    tracer = Tracer(context)
    return Hooks(begun=tracer.begin, after_step=tracer.after_step)


class Tracer:
    """Traces the steps of the section `trace`, and brings the spans of all ranks to rank 0."""

    def __init__(self, context: Context) -> None:
        self._settings, self._parts = context.settings, context.parts
        self._spans = Spans(context.settings.max_spans, context.parts.plan.device)
        self._passes = Passes(self._spans.begin, self._spans.end)
        self._undo: list[Callable[[], None]] = []
        self._moved: Callable[[], list[Moved]] | None = None
        self._steps = 0  # ended since the engine was made
        self._is_on = self._is_over = False
        context.bus.subscribe(Event.STEP_END, self._on_step)

    def begin(self, _: Any) -> None:
        """Start with the first step, if that is traced; say where nothing would keep the spans."""
        if self._parts.mesh.rank == 0 and self._settings.path is None and not self._parts.bus.has(Event.SPANS):
            log.warning("trace: nothing keeps the spans; set trace.path to a file, or run_record.enabled to true")
        self._parts.bus.subscribe(Event.CLOSE, self._on_close)  # where initialize fails, its error says enough
        if self._settings.start_step == 1:
            self._start()

    def after_step(self) -> None:
        """Start and stop with the steps. Collective over: all ranks, when the last traced step has ended."""
        if self._is_over:
            return
        if self._is_on and self._steps >= self._settings.end_step:
            self._stop()
            self._is_over = True
            self._bring()
        elif not self._is_on and self._steps >= self._settings.start_step - 1:
            self._start()

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._steps += 1
        self._spans.step = event["global_step"] + 1

    def _on_close(self, _: Mapping[str, Any]) -> None:
        self._stop()
        if not self._is_over and self._parts.mesh.rank == 0:
            steps, end_step = self._steps, self._settings.end_step
            log.warning("trace: the run ends after %d steps, before trace.end_step %d: no trace", steps, end_step)

    def _start(self) -> None:
        parts, spans = self._parts, self._spans
        self._is_on = True
        spans.step = parts.counters.global_steps + 1
        self._undo.append(parts.mesh.world.comm_trace.subscribe(spans.read))
        if parts.optimization is not None and parts.mesh["data"].size > 1:
            self._undo.append(parts.optimization.grads.time_sums(Waits(spans)))
        if parts.params.tiers.io is not None:
            self._moved = parts.params.tiers.io.note()
        self._passes.attach(parts.clock, parts.bus)

    def _stop(self) -> None:
        self._is_on = False
        self._passes.detach()
        while self._undo:
            self._undo.pop()()
        if self._moved is not None:
            self._spans.add_transfers(self._moved())
            self._moved = None

    def _bring(self) -> None:
        """Bring the spans of all ranks to rank 0. Collective over: all ranks."""
        comm = self._parts.mesh.world.comm
        offset = measure_offset(comm)
        spans, names = packed(self._spans.all(), comm.rank, offset.seconds)
        notes = comm.gather_objects((self._spans.dropped, offset.error))
        brought = bring(comm, spans, names)
        if brought is None:
            return
        found, names = brought
        epoch = time.time() - time.perf_counter()
        for column in ("begin", "end"):
            found[column] += epoch
        log.info(
            "trace: %d spans of steps %d to %d on %d ranks; their clocks agree within %.1f us",
            len(found), self._settings.start_step, self._settings.end_step, comm.size,
            1e6 * max(error for _, error in notes),
        )  # fmt: skip
        dropped = sum(count for count, _ in notes)
        if dropped:
            log.warning("trace: %d spans were left out; trace.max_spans %d is too small, or the steps are too many",
                        dropped, self._settings.max_spans)  # fmt: skip
        self._parts.bus.announce(Event.SPANS, spans=found, names=names)
        if self._settings.path is not None:
            self._write(Path(self._settings.path), found, names)

    def _write(self, path: Path, spans: Any, names: list[str]) -> None:
        try:
            write_chrome(path, spans, names)
        except OSError as error:  # a broken disk must not end a training run
            log.warning("trace: %s cannot be written: %s", path, error)
        else:
            log.info("trace: %s, for https://ui.perfetto.dev", path)
