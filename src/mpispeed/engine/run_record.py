"""The run record of an engine: rank 0 hands over what monitors get, times and memory of all ranks, and events."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed import monitor
from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.base.plain import hide_secrets
from mpispeed.base.site_file import current
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.rank_numbers import NAMES, RankNumbers, period
from mpispeed.mesh import exits
from mpispeed.mesh.world import library
from mpispeed.record import facts
from mpispeed.record.layout import ROW
from mpispeed.record.writer import RecordWriter
from mpispeed.walltime.run_state import run_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from mpispeed.config.record import RunRecord
    from mpispeed.engine.backward import Counters
    from mpispeed.mesh.collectives.group import CommTrace

log = logging.getLogger(__name__)

FOLDER = Path("runs")
"""For records of runs without a folder of their own."""
MOST_WARNINGS = 1000
MOST_TEXT = 4000
LAST_SECONDS = 5.0
"""How long an error waits for the record."""
SWAP = ("bytes_read", "requests_read", "bytes_written", "requests_written")


def attach(context: Context) -> Hooks | None:
    """Write the record of a training run that is to have one; None for others.

    Collective over: all ranks, unless `run_record.enabled` is false.

    Raises:
        ConfigError: `run_record.path` cannot be written.
    """
    options, parts, mesh = context.settings, context.parts, context.mesh
    if parts.optimization is None or options.enabled is False:
        return None
    # auto depends on the environment, which ranks of one job may have differently
    if not mesh.world.comm.share(options.enabled is True or bool(os.environ.get("MPISPEED_RUN_DIR"))):
        return None
    counters, trace = context.counters, mesh.comm_trace
    writer = _start(context, options) if mesh.rank == 0 else None
    recorder = None
    if writer is not None:
        recorder = Recorder(writer, counters, trace)
        recorder.attach(context)
    numbers = RankNumbers(
        counters, trace, period(options.every, mesh.world.size), _ignore if recorder is None else recorder.take_ranks
    )
    numbers.attach(context.bus)
    parts.updates.send_along(numbers)
    context.published["monitor"].add(None if recorder is None else recorder.sink)
    return Hooks(
        begun=None if recorder is None else recorder.begin,
        state=lambda: {} if recorder is None else recorder.identity,
        load=None if recorder is None else recorder.follow,
        published={"run_record": writer},
    )


def _ignore(table: torch.Tensor) -> None:
    """For ranks that write nothing."""


def _start(context: Context, options: RunRecord) -> RecordWriter | None:
    """The writer; None, after a warning, if the place that nobody has chosen for it cannot be written."""
    path = Path(options.path) if options.path else run_folder(os.environ, FOLDER)
    try:
        return RecordWriter(path, _facts(context), reserved={"rows": options.rows})
    except OSError as error:
        text = f"the run record in {path} cannot be written: {error}"
        if options.path:
            msg = f"{text}; correct run_record.path, or set run_record.enabled to false"
            raise ConfigError(msg) from error
        log.warning("%s; the run goes on without it (run_record.path names another place)", text)
        return None


def _facts(context: Context) -> dict[str, Any]:
    plan, table = context.plan, context.params.shards.table
    return {
        "config": hide_secrets(plan.config.resolved_dict()),
        "plan": dict(plan.describe()),
        "model": {  # of rank 0's pipeline stage and slices
            "class": type(context.module).__qualname__,
            "parameters": sum(unit.layout.numel for unit in table.all_units),
            "trained_parameters": sum(unit.layout.numel for unit in table.units),
        },
        "ranks": {"size": plan.world_size, "axes": plan.layout, "nodes": context.mesh.world.node_count},
        "versions": facts.versions(library()),
        "environment": facts.environment(),
        "slurm": facts.slurm(),
        "pbs": facts.pbs(),
        "site": current().as_facts(),
        "command": facts.command(),
    }


class RecordSink:
    """Series that monitors get, for the record."""

    def __init__(self, writer: RecordWriter, counters: Counters) -> None:
        self._writer, self._counters = writer, counters

    def write(self, series: str, value: float, x: int) -> None:
        """Add one point to a series; `x` counts samples."""
        self._writer.row(series, value, step=self._counters.global_steps, samples=max(0, x))

    def flush(self) -> None:
        """No operation: the writer flushes by itself."""

    def close(self) -> None:
        """No operation: the record ends when the engine does."""


class Recorder:
    """Turns events of a run into rows and notes of its record; on rank 0.

    Attributes:
        sink: for points that monitors get.
    """

    def __init__(self, writer: RecordWriter, counters: Counters, trace: CommTrace) -> None:
        self._writer, self._counters, self._trace = writer, counters, trace
        self.sink = RecordSink(writer, counters)
        self._warnings = WarningNotes(writer)
        self._run_end: Any = None
        self._settle: Callable[[], object] | None = None  # learns how the last step ended
        self._is_closed = False

    def attach(self, context: Context) -> None:
        """Listen to the run."""
        bus, self._settle = context.bus, context.parts.updates.settle_at_last
        monitor.attach(bus, [self.sink])
        bus.subscribe(Event.STEP_KNOWN, self._on_step)
        bus.subscribe(Event.SWAP, self._on_swap)
        bus.subscribe(Event.SPANS, self._on_spans)
        bus.subscribe(Event.SAVE_END, self._on_save)
        bus.subscribe(Event.LOAD_END, self._on_load)
        bus.subscribe(Event.CLOSE, lambda _: self.close())
        exits.tell_errors(self._on_error)
        atexit.register(self.close)  # many scripts end without closing their engine
        logging.getLogger("mpispeed").addHandler(self._warnings)

    @property
    def identity(self) -> dict[str, str]:
        """The record, for checkpoints: runs that go on from them name it."""
        return {"run": self._writer.run, "file": str(self._writer.path.absolute())}

    def begin(self, engine: Any) -> None:
        """Say where the record is. Local."""
        self._run_end = engine.mpispeed.parts.features.published.get("run_end")
        log.info("%-10s %s", "record", self._writer.path)
        self._writer.note("begin", step=self._counters.global_steps, samples=self._counters.global_samples)

    def follow(self, state: Mapping[str, Any]) -> None:
        """Name the record of the run that has written the checkpoint."""
        if state.get("run") not in (None, self._writer.run):
            self._writer.note("follows", run=state["run"], file=state.get("file", ""))

    def take_ranks(self, table: torch.Tensor) -> None:
        """Write numbers of all ranks, and totals of communication. Shapes: [ranks, NAMES]."""
        values = table.numpy().reshape(-1)
        known = np.flatnonzero(np.isfinite(values))
        rows = np.zeros(len(known), ROW)
        series = np.array([self._writer.number(name) for name in NAMES], np.uint32)
        rows["rank"], rows["series"] = known // len(NAMES), series[known % len(NAMES)]
        rows["step"], rows["samples"] = self._counters.global_steps, self._counters.global_samples
        rows["time"], rows["value"] = time.time(), values[known]
        self._writer.rows(rows)
        self._write_traffic()

    def _row(self, series: str, value: float) -> None:
        counters = self._counters
        self._writer.row(series, value, step=counters.global_steps, samples=counters.global_samples)

    def _write_traffic(self) -> None:
        for (verb, axes), entry in self._trace.entries().items():
            head = f"Communication/{verb}/{','.join(axes) or 'alone'}"
            self._row(f"{head}/calls", entry.count)
            self._row(f"{head}/bytes", entry.bytes)
            self._row(f"{head}/seconds", entry.seconds)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._row("Step/seconds", event["seconds"])
        self._row("Step/update_seconds", event["update_seconds"])
        self._row("Step/gradient_norm", event["norm"])
        if event["skipped"]:
            self._row("Step/skipped", 1.0)

    def _on_swap(self, event: Mapping[str, Any]) -> None:
        for name in SWAP:
            self._row(f"Swap/{name}", event[name])

    def _on_spans(self, event: Mapping[str, Any]) -> None:
        self._writer.spans(event["spans"], event["names"])
        self._writer.note("trace", step=self._counters.global_steps, spans=len(event["spans"]))

    def _on_save(self, event: Mapping[str, Any]) -> None:
        self._writer.note("save", step=self._counters.global_steps, **event)

    def _on_load(self, event: Mapping[str, Any]) -> None:
        self._writer.note("load", step=self._counters.global_steps, samples=self._counters.global_samples, **event)

    def _on_error(self, error: BaseException) -> None:
        """Keep what ends the program; whatever follows may not come back here."""
        if self._is_closed:
            return
        if self._settle is not None:
            with suppress(Exception):  # the device may be what has failed
                self._settle()
        text = f"{type(error).__name__}: {error}"[:MOST_TEXT]
        where = "".join(traceback.format_tb(error.__traceback__))[-MOST_TEXT:]
        self._writer.note("fault", step=self._counters.global_steps, text=text, trace=where)
        self.close("failed", LAST_SECONDS)

    def close(self, state: str = "", limit_seconds: float | None = None) -> None:
        """Write what is left, and end the record."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        logging.getLogger("mpispeed").removeHandler(self._warnings)
        error = sys.exc_info()[1]
        has_failed = error is not None and not isinstance(error, (StopIteration, GeneratorExit, SystemExit))
        if has_failed and not state:
            self._writer.note("fault", text=f"{type(error).__name__}: {error}"[:MOST_TEXT])
        if not state:
            stops = self._run_end is not None and self._run_end.must_stop
            state = "failed" if has_failed else "interrupted" if stops else "finished"
        self._write_traffic()
        steps, samples = self._counters.global_steps, self._counters.global_samples
        self._writer.note("close", state=state, step=steps, samples=samples)
        self._writer.close() if limit_seconds is None else self._writer.close(limit_seconds)


class WarningNotes(logging.Handler):
    """Keeps warnings of this library as notes."""

    def __init__(self, writer: RecordWriter) -> None:
        super().__init__(logging.WARNING)
        self._writer, self._left = writer, MOST_WARNINGS

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning or an error."""
        if self._left <= 0:
            return
        self._left -= 1
        try:
            text = record.getMessage()[:MOST_TEXT]
        except Exception:
            self.handleError(record)  # a wrong call of the log must not end a training run
            return
        self._writer.note("warning", level=record.levelname, text=text, logger=record.name)
