"""Engine methods for checkpoints: save in the foreground or background, wait, load."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.events import Event
from mpispeed.base.log import once
from mpispeed.ckpt.format.errors import PLAIN, SaveFailed
from mpispeed.ckpt.format.tags import check_same_tag
from mpispeed.ckpt.write.background import BackgroundSaver, has_deferred
from mpispeed.ckpt.write.save import carry_out, prepare
from mpispeed.engine.state import load, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpispeed.base.events import Bus
    from mpispeed.ckpt.write.request import Request
    from mpispeed.ckpt.write.save import SaveReport
    from mpispeed.engine.build.parts import Parts

log = logging.getLogger(__name__)

CHANNEL = "checkpoint"


@dataclass(slots=True)
class _Pending:
    """A save under way. Units: seconds."""

    started: float
    stall_seconds: float


class Checkpoints:
    """Saving and loading of whole runs. See `docs/guides/checkpoints.md`."""

    parts: Parts
    training: bool
    _saver: BackgroundSaver | None = None
    _pending: _Pending | None = None

    if TYPE_CHECKING:

        @property
        def bus(self) -> Bus:
            """The event bus of the engine."""
            ...

        def _require(self, verb: str) -> None: ...

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        overwrite: bool | None = None,
        async_save: bool | None = None,
    ) -> bool:
        """Write a checkpoint that any number of ranks can load.

        An existing tag is replaced, and stays readable until the new one is complete; with `overwrite` false (None: as
        "checkpoint.overwrite" says) it is refused. With `async_save` (None: as "checkpoint.async_save" says) the state
        is copied and written while training goes on. A failure is logged when it happens and raised by the next
        `save_checkpoint`, `wait_checkpoint`, `load_checkpoint` or `destroy`.

        Collective over: all ranks.

        Raises:
            CheckpointError: on every rank, if any rank could not write. Nothing is published then, unless the message
                says that the checkpoint is saved but could not be entered as the latest.
            TypeError: `client_state` holds an object that has no plain form (pickle is not used).
            ValueError: `client_state` has a key that belongs to the checkpoint.
        """
        self._require("save_checkpoint")
        start, parts = time.perf_counter(), self.parts
        parts.sharding.meet("engine.save_checkpoint()")
        waited = self._waited()
        tag = f"global_step{parts.counters.global_steps}" if tag is None else str(tag)
        tag = check_same_tag(parts.mesh.world.comm, tag, parts.plan.config.checkpoint.tag_validation)
        flags = save.SaveSettings(save_latest, exclude_frozen_parameters, overwrite)
        content = save.content(parts, client_state or {}, flags)
        request = prepare(parts.mesh.world.comm, Path(save_dir), tag, **content)
        if self._begins(request, async_save):
            self._pending = _Pending(start, time.perf_counter() - start)
            self._say(f"copied {tag}, which is written while training goes on,", self._pending.stall_seconds, waited)
            return True
        report = carry_out(parts.mesh.world.comm, request)
        stall = time.perf_counter() - start
        self._say(f"saved {report.path}", stall, waited)
        self._announce(report, stall, stall)
        return True

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written in the background or has not been waited for."""
        return self._pending is not None

    def wait_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written in the background, if any, is complete.

        Collective over: all ranks.

        Raises:
            CheckpointError: on every rank, if it could not be written, or not be entered as the latest, as the message
                says. Earlier checkpoints are untouched.
        """
        saver, pending = self._saver, self._pending
        if saver is None or pending is None:
            return
        try:
            report = saver.wait()
        finally:  # whoever is interrupted while waiting may wait again
            self._pending = pending if saver.is_pending() else None
        if report is not None:
            seconds = time.perf_counter() - pending.started
            self._announce(report, min(seconds, report.seconds + pending.stall_seconds), pending.stall_seconds)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
        load_data_state: bool = True,
        client_types: Sequence[type] = (),
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that was written by any number of ranks; return (path, client_state).

        State that is not loaded (the learning rate schedule without `load_lr_scheduler_states`; also counters and data
        position with `load_module_only`) is returned within client_state, under the names of the state tree.

        Dataclasses and enums of client_state whose classes are among `client_types` come back as such; others as
        `argparse.Namespace` and as the plain value, because no class is imported on the word of a file.

        Collective over: all ranks.

        Raises:
            CheckpointError: on every rank, if the checkpoint is damaged or does not fit the model or `client_types`.
            UsageError: one of `client_types` is neither a dataclass nor an enum.
        """
        self._require("load_checkpoint")
        self.wait_checkpoint()
        only = load_optimizer_states, load_lr_scheduler_states, load_module_only
        settings = load.LoadSettings(load_module_strict, *only, custom_load_fn, load_data_state, client_types)
        path, client_state = load.load(self.parts, load_dir, tag, settings)
        if path is not None:
            self.parts.show(is_training=self.training, is_refreshed=True)
        return path, client_state

    # -- parts ---------------------------------------------------------------------------------------------------

    def _begins(self, request: Request, is_asked: bool | None) -> bool:
        """Start the save in the background; False if it has to be written now. Collective over: all ranks."""
        parts, comm = self.parts, self.parts.mesh.world.comm
        if not comm.share(parts.plan.config.checkpoint.async_save if is_asked is None else is_asked):
            return False
        reason = ""
        if not parts.mesh.world.has_threads:
            reason = "this MPI was not started with THREAD_MULTIPLE"
        elif any(comm.gather_objects(has_deferred(request.tensors))):
            reason = "states in swap files cannot be copied"
        if reason:
            level = logging.WARNING if parts.mesh.rank == 0 else logging.DEBUG
            once(log, level, f"checkpoints are written before save_checkpoint returns: {reason}")
            return False
        if self._saver is None:
            self._saver = BackgroundSaver(parts.mesh.channel(CHANNEL)[parts.mesh.topology.names])
        with comm.together(
            SaveFailed, doing="copying the state, which asynchronous saves need host memory for", plain=PLAIN
        ):
            request = self._saver.copy(request)
        self._saver.start(request)
        return True

    def _waited(self) -> float:
        """Wait for the previous save; return the seconds waited. Collective over: all ranks."""
        if not self.is_saving:
            return 0.0
        start = time.perf_counter()
        self.wait_checkpoint()
        return time.perf_counter() - start

    def _say(self, what: str, stall: float, waited: float) -> None:
        """Log how long training was stalled."""
        rest = f", {waited:.3f} s of it for the save before" if waited > stall / 100 else ""
        log.info("%s in %.3f s%s", what, stall, rest)

    def _announce(self, report: SaveReport, seconds: float, stall_seconds: float) -> None:
        self.bus.announce(
            Event.SAVE_END,
            path=str(report.path),
            tag=report.tag,
            seconds=seconds,
            stall_seconds=stall_seconds,
            bytes=report.size_bytes,
        )
