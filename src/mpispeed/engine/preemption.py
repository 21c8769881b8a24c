"""End of a run before its job ends: after steps all ranks agree to save or stop, and the next job resumes."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.base.units import format_duration
from mpispeed.ckpt.format import tags
from mpispeed.engine.hooks import Hooks
from mpispeed.walltime import run_state
from mpispeed.walltime.handoff import Ending, Leaving
from mpispeed.walltime.job_end import LIMIT, JobEnd
from mpispeed.walltime.last_safe_step import Margin, RunEnded, SaveClock, StepClock, choose_limit, judge
from mpispeed.walltime.requests import Asked, SignalWatch, TouchFiles
from mpispeed.walltime.run_state import FAILED, FINISHED, RUNNING

if TYPE_CHECKING:
    from mpispeed.base.events import Bus
    from mpispeed.config.walltime import Walltime
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.hooks import Context
    from mpispeed.mesh.mesh import Mesh

log = logging.getLogger(__name__)


def attach(context: Context) -> Hooks | None:
    """End a run that has `walltime.save_dir` in time, and resume it; None for others.

    Raises:
        ConfigError: MPISPEED_WALLTIME is not a duration.
    """
    options, parts = context.settings, context.parts
    if options.save_dir is None or not options.enabled or parts.optimization is None:
        if os.environ.get(LIMIT) and context.mesh.rank == 0 and parts.optimization is not None:
            log.warning("%s is set, but walltime.save_dir is not: nothing is saved before the job ends", LIMIT)
        return None
    limit = choose_limit(options.limit, os.environ.get(LIMIT))
    slots = len(parts.optimization.rule.state_names)
    own = sum(
        param.numel() * (param.dtype.itemsize + 4 * (1 + slots) * param.requires_grad)
        for param in context.module.parameters()
    )
    is_local = context.plan.config.checkpoint.use_node_local_storage
    run_end = RunEnd(Run(context.mesh, context.counters, context.bus, own, is_local), options, limit)
    return Hooks(
        begun=run_end.begin,
        after_step=run_end.end_step,
        between_steps=run_end.heed_between_steps,
        published={"run_end": run_end},
    )


class Engine(Protocol):
    """The engine of the run, as far as it is asked here."""

    client_state: dict[str, Any]
    mpispeed: Any

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written in the background."""

    def save_checkpoint(self, save_dir: str, tag: str | None, *, client_state: dict[str, Any]) -> Any:
        """Collective over: all ranks."""

    def load_checkpoint(self, load_dir: str) -> tuple[str | None, dict[str, Any] | None]:
        """Collective over: all ranks."""

    def wait_checkpoint(self) -> Any:
        """Collective over: all ranks."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that ends.

    Attributes:
        mesh: its ranks.
        counters: its steps.
        bus: its events.
        own_bytes: this rank's states in a checkpoint, as if it wrote those of all data ranks.
        is_local: every node keeps checkpoints of its own.
    """

    mesh: Mesh
    counters: Counters
    bus: Bus
    own_bytes: int
    is_local: bool


class RunEnd:
    """The end of one run: requests to save or stop, the job's time limit, and the hand-off to the next job.

    Rank 0 knows the end of the job and looks for files; every rank watches its signals. After steps the ranks agree in
    one all-reduce (maximum) of four numbers. See `docs/hpc/walltime.md`.

    Attributes:
        must_stop: the run was saved because it has to end.
        resumed_from: the checkpoint from which this run resumed by itself, or None.
    """

    def __init__(self, run: Run, options: Walltime, limit_seconds: float | None) -> None:
        self._run, self._options = run, options
        self._found: weakref.ref[Engine] | None = None
        self._save_dir = Path(str(options.save_dir))
        self._is_first = self._run.mesh.rank == 0
        self._folder = run_state.run_folder(os.environ, self._save_dir)
        self._signals = SignalWatch(options.signals)
        self._files = TouchFiles(self._folder)
        self._leaving: Leaving | None = None  # on rank 0
        if self._is_first:
            self._leaving = Leaving(os.environ, self._folder, follows=options.chain, most_links=options.max_chain)
        self._job_end = JobEnd(limit_seconds, os.environ if self._is_first else {})
        self._steps, self._saves = StepClock(), SaveClock(0)
        self._margin = Margin(options.margin_seconds, options.margin_factor)
        self._since = time.monotonic()
        self._has_stepped = self._has_pause = self._is_saving = False
        self._steps_to_check = 1
        self._last: Mapping[str, Any] = {"loss": math.nan}
        self._saved: tuple[int, str] = (-1, "")  # step and tag of the last complete checkpoint of this run's own
        self._is_closed = False
        self.must_stop = False
        self.resumed_from: str | None = None

    # -- begin and end -------------------------------------------------------------------------------------------

    def begin(self, engine: Engine) -> None:
        """Install signal handlers, resume, and log what will happen.

        Checkpoints are saved and loaded by the methods of `engine`, for which a script may have put others on it.

        Collective over: all ranks.

        Raises:
            CheckpointError: on every rank, if there is a checkpoint and it cannot be loaded.
            ConfigError: on every rank, if another run uses the folder.
        """
        self._found = weakref.ref(engine)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def _engine(self) -> Engine:
        """The engine, which calls this object and so is there."""
        engine = None if self._found is None else self._found()
        if engine is None:
            msg = "the end of a run was asked for before its engine had begun, or after it was gone"
            raise UsageError(msg)
        return engine

    def _begin(self) -> None:
        rival = "" if self._leaving is None else self._leaving.find_rival()
        self._run.mesh.world.comm.agree(not rival, rival, ConfigError)
        if not self._signals.install():
            log.info("signals cannot be watched: initialize was not called in the main thread")
        for event, listener in (
            (Event.BATCH_START, self._on_batch),
            (Event.STEP_END, self._on_step),
            (Event.SAVE_END, self._on_save),
            (Event.CLOSE, self._on_close),
        ):
            self._run.bus.subscribe(event, listener)
        comm = self._run.mesh.world.comm
        size_bytes = sum(comm.gather_objects(self._run.own_bytes)) / self._run.mesh["data"].size
        if self._options.resume:
            self._resume()
        if self._leaving is not None:
            known = self._leaving.begin(self._save_dir, self._run.counters.global_steps, self._saved[1])
            self._saves = SaveClock(size_bytes, known)
            self._job_end.start()
            self._describe()
        self._since = time.monotonic()
        self._refuse_stopped()

    def _resume(self) -> None:
        """Collective over: all ranks."""
        world, has_some = self._run.mesh.world, False
        if world.local_rank == 0 and self._save_dir.is_dir():
            has_some = any(entry.is_dir() for entry in self._save_dir.iterdir())
        if not any(world.comm.gather_objects(has_some)):
            return
        path, client = self._engine.load_checkpoint(str(self._save_dir))
        self.resumed_from = path
        if path is None:
            return
        self._engine.client_state.update(client or {})
        self._saved = (self._run.counters.global_steps, Path(path).name)
        log.info("walltime   resumed from %s at step %d", path, self._run.counters.global_steps)

    def _refuse_stopped(self) -> None:
        """End the run at once if a file STOP is left from before. Collective over: all ranks."""
        is_stopped = self._is_first and self._files.look() is Asked.STOP
        if self._run.mesh.world.comm.share(is_stopped):
            self._end(Asked.STOP, "the file STOP", self._saved[1])

    def _describe(self) -> None:
        left, saves = self._job_end.left_seconds, self._saves
        if math.isinf(left):
            why = f" ({self._job_end.problem})" if self._job_end.problem else ""
            asks = f"signals {', '.join(self._options.signals)} and the files SAVE and STOP in {self._folder}"
            log.info("walltime   the end of the job is not known%s; set %s; %s are heeded", why, LIMIT, asks)
            return
        log.info(
            "walltime   the job ends in %s, by %s; a save is expected to take %s%s",
            format_duration(max(0.0, left)), self._job_end.source, format_duration(saves.expected_seconds),
            " (a guess, until the first one)" if saves.is_guess else "",
        )  # fmt: skip

    def close(self) -> None:
        """Restore signal handlers and stop watching."""
        self._is_closed = True
        self._signals.restore()
        self._job_end.close()

    # -- events --------------------------------------------------------------------------------------------------

    def _on_batch(self, event: Mapping[str, Any]) -> None:
        self._has_pause = self._has_pause or not event["is_training"]

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._has_stepped, self._last = True, event

    def _on_save(self, event: Mapping[str, Any]) -> None:
        is_own = self._is_first and Path(event["path"]).parent.resolve() == self._save_dir.resolve()
        self._saves.note(event["seconds"], is_own=is_own)
        self._has_pause = self._has_pause or not self._is_saving

    def _on_close(self, event: Mapping[str, Any]) -> None:
        if self._is_closed:
            return
        error, step = sys.exc_info()[1], self._run.counters.global_steps
        if self._leaving is not None and self._leaving.state == RUNNING:
            if error is None or isinstance(error, StopIteration) or (isinstance(error, SystemExit) and not error.code):
                self._leaving.mark(FINISHED, step, "the program was done")
            else:
                self._leaving.mark(FAILED, step, f"{type(error).__name__}: {error}")
        self.close()

    # -- between steps -------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Agree on requests, if a check is due. Collective over: all ranks, if it is."""
        if not self._has_stepped or self._is_closed or self.must_stop:
            return
        self._has_stepped, now = False, time.monotonic()
        self._steps.note(self._run.counters.global_steps, now - self._since, has_pause=self._has_pause)
        self._since, self._has_pause = now, False
        self._steps_to_check -= 1
        if self._steps_to_check <= 0:
            self._agree()

    def heed_between_steps(self) -> None:
        """Agree on requests now, unless micro-batches are under way. Collective over: all ranks."""
        self._has_pause = True
        if not (self._is_closed or self.must_stop or self._run.counters.pending_backwards):
            self._agree()

    def _agree(self) -> None:
        """Collective over: all ranks."""
        number, next_steps = self._signals.number, 0
        asked = Asked.SIGNAL if number else Asked.NOTHING
        if self._is_first:
            found, next_steps = self._first_asks()
            asked = max(asked, found)
        # Maxima: the strongest request, the steps until the next check, the signal, and a rank that got one.
        agreed = torch.tensor([asked, next_steps, number, self._run.mesh.rank + 1 if number else 0])
        self._run.mesh.world.comm.all_reduce(agreed, "max")
        strongest, self._steps_to_check, number, rank = agreed.tolist()
        if strongest == Asked.NOTHING:
            return
        if self._is_first and strongest in TouchFiles.NAMES:
            self._files.take(Asked(strongest))
        try:
            if strongest == Asked.SAVE:
                self._save_and_go_on()
            else:
                self._signals.take()
                self._stop(Asked(strongest), SignalWatch.name_of(number), rank - 1)
        finally:
            self._since = time.monotonic()

    def _first_asks(self) -> tuple[Asked, int]:
        """The request that rank 0 finds, and the steps until the next check."""
        counters, pending = self._run.counters, int(self._engine.is_saving)
        left = self._job_end.left_seconds
        verdict = judge(left, counters.global_steps, self._steps, self._saves, self._margin, pending=pending)
        if verdict.is_last:
            log.info(
                "walltime   %s left, %s needed for another step and a save", format_duration(max(0.0, left)),
                format_duration(verdict.needed_seconds),
            )  # fmt: skip
        return max(self._files.look(), Asked.JOB_END if verdict.is_last else Asked.NOTHING), verdict.next_steps

    # -- save and end --------------------------------------------------------------------------------------------

    def _save_and_go_on(self) -> None:
        """Collective over: all ranks."""
        try:
            self._save(None)
        except CheckpointError as error:
            if self._is_first:
                log.error("walltime   the file SAVE asked for a checkpoint, which failed; training goes on: %s", error)  # noqa: TRY400

    def _save(self, in_background: bool | None) -> str:
        """Write a checkpoint unless this step has one already; return its tag. Collective over: all ranks."""
        step = self._run.counters.global_steps
        if self._saved[0] == step:
            return self._saved[1]
        engine, tag = self._engine, self._options.tag.replace("{step}", str(step))
        self._is_saving = True
        try:
            # The arguments are DeepSpeed's alone: a script's own method may know no others.
            with engine.mpispeed.checkpoints.by_default(overwrite=True, async_save=in_background):
                engine.save_checkpoint(str(self._save_dir), tag, client_state=dict(engine.client_state))
            if in_background is False:
                engine.wait_checkpoint()  # a script's own method may have asked for the background
        finally:
            self._is_saving = False
        self._saved = (step, tag) if not engine.is_saving else self._saved
        self._remove_old(tag)
        return tag

    def _remove_old(self, tag: str) -> None:
        """Remove older checkpoints with automatic tags, beyond `walltime.keep_last`."""
        world, keep = self._run.mesh.world, self._options.keep_last
        is_local = self._run.is_local
        if not keep or (world.local_rank if is_local else world.rank):
            return
        pattern = re.compile(re.escape(self._options.tag).replace(r"\{step\}", "[0-9]+"))
        try:
            own = [
                entry for entry in tags.list_tags(self._save_dir) if pattern.fullmatch(entry.tag) and entry.tag != tag
            ]
            tags.remove_all(entry.path for entry in tags.beyond(own, keep - 1))
        except (OSError, CheckpointError) as error:
            log.warning("old checkpoints in %s could not be removed: %s", self._save_dir, error)

    def _stop(self, asked: Asked, signal_name: str, rank: int) -> None:
        """Save, and end the run. Collective over: all ranks."""
        reason = {
            Asked.JOB_END: "the job ends",
            Asked.SIGNAL: f"{signal_name} on rank {rank}",
            Asked.STOP: "the file STOP",
        }[asked]
        try:
            self._finish_pending()
            tag = self._save(False)
        except CheckpointError as error:
            if self._leaving is not None:
                step = self._run.counters.global_steps
                self._leaving.mark(FAILED, step, f"{reason}, and the save failed: {error}")
            raise
        self._end(asked, reason, tag, signal_name)

    def _end(self, asked: Asked, reason: str, tag: str, signal_name: str = "") -> None:
        """Mark the run, requeue the job if asked, and leave. Collective over: all ranks."""
        step = self._run.counters.global_steps
        if self._leaving is not None:
            seconds = 0.0 if self._saves.is_guess else self._saves.expected_seconds
            self._leaving.leave(Ending(asked, reason, tag, step, seconds, signal_name))
        self._run.mesh.world.comm.barrier()  # nobody leaves before the next job is submitted
        self.must_stop = True
        if self._options.ends_program:
            raise RunEnded(self._options.exit_code, tag=tag, step=step, reason=reason, loss=self._last["loss"])

    def _finish_pending(self) -> None:
        """Wait for a checkpoint in the background; its failure is logged, and the next save is still tried."""
        try:
            self._engine.wait_checkpoint()
        except CheckpointError as error:
            if self._is_first:
                log.error("walltime   the checkpoint before this one failed: %s", error)  # noqa: TRY400
