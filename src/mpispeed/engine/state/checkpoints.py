"""Checkpoints of an engine: save in the foreground or background, wait, load; and what a checkpoint holds."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base import rng
from mpispeed.base.events import Event
from mpispeed.base.log import once
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import PLAIN, ReservedKey, SaveFailed
from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.ckpt.format.tags import check_same_tag
from mpispeed.ckpt.write.background import BackgroundSaver, has_deferred
from mpispeed.ckpt.write.request import SaveOptions
from mpispeed.ckpt.write.save import carry_out, prepare
from mpispeed.engine.state import load
from mpispeed.engine.state.client_state import Kept, windows_of
from mpispeed.engine.state.global_layout import (
    GlobalLayout,
    exchanging_run,
    names_by_group,
    require_named,
    slice_streams,
    tensors_of,
)
from mpispeed.engine.state.rule_numbers import numbers_by_name
from mpispeed.optim.rule import MASK, KeepsNumbers
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.state_dtypes import describe_codes
from mpispeed.sharding.units import tied_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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
    """Saving and loading of whole runs. See `docs/guides/checkpoints.md`.

    Attributes:
        client_state: goes into checkpoints that are made because the run ends, and comes back when it is resumed.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.client_state: dict[str, Any] = {}
        self._overwrite: bool | None = None
        self._async_save: bool | None = None
        self._saver: BackgroundSaver | None = None
        self._pending: _Pending | None = None

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
        start, parts = time.perf_counter(), self._parts
        parts.require("save_checkpoint")
        parts.updates.settle()
        parts.sharding.meet("engine.save_checkpoint()")
        waited = self._waited()
        flags = SaveSettings(
            save_latest, exclude_frozen_parameters, self._overwrite if overwrite is None else overwrite
        )
        async_save = self._async_save if async_save is None else async_save
        try:
            parts.features.before_save()
            return self._save(Path(save_dir), tag, client_state or {}, flags, async_save, start, waited)
        finally:
            if not self.is_saving:
                parts.features.after_save()

    @contextmanager
    def by_default(self, *, overwrite: bool | None, async_save: bool | None) -> Iterator[None]:
        """Context in which these stand for what a caller of `save_checkpoint` leaves None."""
        before = self._overwrite, self._async_save
        self._overwrite, self._async_save = overwrite, async_save
        try:
            yield
        finally:
            self._overwrite, self._async_save = before

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
        self._parts.updates.settle()
        saver, pending = self._saver, self._pending
        if saver is None or pending is None:
            return
        try:
            report = saver.wait()
        finally:  # whoever is interrupted while waiting may wait again
            self._pending = pending if saver.is_pending() else None
            if self._pending is None:
                self._parts.features.after_save()
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
        self._parts.require("load_checkpoint")
        self.wait_checkpoint()
        only = load_optimizer_states, load_lr_scheduler_states, load_module_only
        settings = load.LoadSettings(load_module_strict, *only, custom_load_fn, load_data_state, client_types)
        path, client_state = load.load(self._parts, load_dir, tag, settings)
        if path is not None:
            self._parts.show_loaded()
        return path, client_state

    def close(self) -> None:
        """Drop the buffers of saves in the background; none is under way."""
        self._saver = None

    # -- parts ---------------------------------------------------------------------------------------------------

    def _save(
        self,
        folder: Path,
        tag: str | None,
        client_state: dict[str, Any],
        flags: SaveSettings,
        is_async: bool | None,
        start: float,
        waited: float,
    ) -> bool:
        """Collective over: all ranks."""
        parts = self._parts
        tag = f"global_step{parts.counters.global_steps}" if tag is None else str(tag)
        tag = check_same_tag(parts.mesh.world.comm, tag, parts.plan.config.checkpoint.tag_validation)
        request = prepare(parts.mesh.world.comm, folder, tag, **content(parts, client_state, flags))
        if self._begins(request, is_async):
            self._pending = _Pending(start, time.perf_counter() - start)
            self._say(f"copied {tag}, which is written while training goes on,", self._pending.stall_seconds, waited)
            return True
        report = carry_out(parts.mesh.world.comm, request)
        stall = time.perf_counter() - start
        self._say(f"saved {report.path}", stall, waited)
        self._announce(report, stall, stall)
        return True

    def _begins(self, request: Request, is_asked: bool | None) -> bool:
        """Start the save in the background; False if it has to be written now. Collective over: all ranks."""
        parts, comm = self._parts, self._parts.mesh.world.comm
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
        doing = "copying the state, which asynchronous saves need host memory for"
        with comm.together(SaveFailed, doing=doing, plain=PLAIN):
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
        self._parts.bus.announce(
            Event.SAVE_END,
            path=str(report.path),
            tag=report.tag,
            seconds=seconds,
            stall_seconds=stall_seconds,
            bytes=report.size_bytes,
        )


# -- what a checkpoint holds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """Flags of `save_checkpoint`; `overwrite` None: as the config says."""

    save_latest: bool = True
    exclude_frozen_parameters: bool = False
    overwrite: bool | None = None


RECOVERY_SCRIPT = "zero_to_fp32.py"
"""File beside `latest`, for users who look for DeepSpeed's of that name."""

_RECOVERY_TEXT = """\
#!/usr/bin/env python
# Writes the fp32 weights of a checkpoint: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT [--tag TAG]
from mpispeed.compat.fp32_script import main

raise SystemExit(main())
"""

RESERVED = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "micro_steps", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
})  # fmt: skip
"""Names that `load_checkpoint` and DeepSpeed's checkpoints use themselves; none may be a key of client_state."""


def content(parts: Parts, client_state: dict[str, Any], settings: SaveSettings) -> dict[str, Any]:
    """The engine's state for a checkpoint, as arguments of `ckpt.write.request.prepare`.

    Collective over: all ranks.

    Raises:
        ReservedKey: on every rank, if `client_state` has a key that belongs to the checkpoint.
    """
    comm, options = parts.mesh.world.comm, parts.plan.config.checkpoint
    taken = sorted(RESERVED.intersection(client_state))
    problem = f"client_state has the keys {', '.join(taken)}, which the checkpoint itself uses; rename them"
    comm.agree(not taken, problem, ReservedKey)
    if parts.buffers is not None:
        parts.buffers.equalise(is_thorough=True)
    windows, whole = windows_of(parts), GlobalLayout.of(parts)
    require_named(parts, whole)
    kept, optimization = Kept.of(parts, whole, windows), parts.optimization
    has_numbers = optimization is not None and isinstance(optimization.rule, KeepsNumbers)
    infos = whole.infos(_param_infos(parts, settings, numbers_by_name(parts, whole) if has_numbers else {}))
    saved = {info.name for info in infos}
    has_frozen = not settings.exclude_frozen_parameters
    more = None if optimization is None else optimization.exchange.saved(exchanging_run(parts, whole))
    state = _state(parts, whole, kept, client_state)
    if more is not None:
        state["optimizer"] |= more.state()
    aliases = whole.over_stages(tied_names(parts.module).items())
    return {
        "params": infos,
        "tensors": whole.tensors(tensors_of(parts, whole, windows, kept.slots, has_frozen=has_frozen, more=more)),
        "aliases": {alias: name for alias, name in aliases if name in saved},
        "state": state,
        "config_json": parts.plan.config.model_dump_json(),
        "rng": {**rng.capture(), **slice_streams()},
        "layout": {**parts.plan.layout, "stage": parts.plan.stage, "world_size": parts.plan.world_size},
        "options": SaveOptions(
            overwrite=options.overwrite if settings.overwrite is None else settings.overwrite,
            save_latest=settings.save_latest,
            verify=options.read_back,
            writing=options.writing,
            files=options.files,
            window_bytes=max(options.window_bytes, schema.BLOCK_BYTES),
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            node_local=options.use_node_local_storage,
            scripts={RECOVERY_SCRIPT: _RECOVERY_TEXT},
        ),
    }


def _param_infos(parts: Parts, settings: SaveSettings, numbers: Mapping[str, Mapping[str, float]]) -> list[ParamInfo]:
    infos = []
    step = parts.counters.update_count
    for name, param in parts.module.named_parameters():
        place = parts.table.find(param)
        if place is not None:
            compute = place.unit.states.compute
            info = ParamInfo(name, tuple(param.shape), compute, "trainable", place.entry.group, step)
            infos.append(replace(info, scalars=dict(numbers.get(name, {}))))
        elif not settings.exclude_frozen_parameters:
            place = parts.table.locate(param)
            compute = param.dtype if place is None else place.unit.states.compute
            infos.append(ParamInfo(name, tuple(param.shape), compute, "frozen", -1, 0))
    return infos


def _scalars(parts: Parts) -> dict[str, Any]:
    """Scalars of the rule; rules that keep scalars of each parameter have them in `ParamInfo`.

    Collective over: all ranks.
    """
    optimization = parts.optimization
    if optimization is None or isinstance(optimization.rule, KeepsNumbers):
        return {}
    return optimization.exchange.scalars()


def _state(parts: Parts, whole: GlobalLayout, kept: Kept, client_state: dict[str, Any]) -> dict[str, Any]:
    """The state tree: everything that is not a tensor. Collective over: all ranks."""
    counters = parts.counters
    state: dict[str, Any] = {
        "engine": {
            "global_steps": counters.global_steps,
            "global_samples": counters.global_samples,
            "skipped_steps": counters.skipped_steps,
            "micro_steps": counters.micro_steps,
            "loss_scaler": parts.scaler.state_dict(),
        },
        "client": client_state,
    }
    states: dict[str, Any] = {}
    with parts.mesh.world.comm.together(SaveFailed, doing="asking features for their state", plain=PLAIN):
        states = parts.features.state()
    if states:
        state["features"] = states
    optimization = parts.optimization
    if optimization is not None:
        members = whole.names_by_group(names_by_group(parts))
        state["optimizer"] = {
            "name": optimization.rule.name,
            # rank 0 writes it, and its stage may train nothing
            "slots": sorted({*optimization.rule.state_names}.union(*kept.slots.values())),
            "dtypes": describe_codes(parts.plan.config),
            "scalars": {"of_params": kept.to_tree(), "of_rule": _scalars(parts)},
            "param_groups": [
                {**{k: v for k, v in group.items() if k not in ("params", MASK)}, "params": members[index]}
                for index, group in enumerate(optimization.groups)
            ],
        }
    if isinstance(parts.module, PipelineModule):
        state["pipeline"] = {"micro_offset": parts.module.micro_offset}
    if parts.scheduler is not None:
        state["lr_scheduler"] = _plain_scheduler(parts.scheduler.state_dict())
    return state


def _plain_scheduler(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without callables (torch keeps lambdas out of it too, as None)."""
    return {key: value for key, value in state.items() if not callable(value)}
