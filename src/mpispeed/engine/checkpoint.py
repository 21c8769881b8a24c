"""What an engine writes to a checkpoint: logical tensors, counters, generators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import rng
from mpispeed.ckpt import schema
from mpispeed.ckpt.errors import ReservedKey
from mpispeed.ckpt.logical import ParamInfo
from mpispeed.ckpt.request import SaveOptions
from mpispeed.engine.onebit_state import CodedTensors, merge_nested, numbers_by_name
from mpispeed.engine.pieces import tensors_of
from mpispeed.engine.whole import Whole
from mpispeed.nn.random import get_rng_tracker
from mpispeed.optim.exchange import Exchanges
from mpispeed.optim.rule import KeepsNumbers, KeepsState
from mpispeed.pipe.module import PipelineModule
from mpispeed.zero.momenta import MASK
from mpispeed.zero.units import tied_names
from mpispeed.zero.walk import Walker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.engine.parts import Parts
    from mpispeed.optim.rule import Window


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """Flags of `save_checkpoint`."""

    save_latest: bool = True
    exclude_frozen_parameters: bool = False
    overwrite: bool = False


RESERVED = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "micro_steps", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
})  # fmt: skip
"""Names that `load_checkpoint` and DeepSpeed's checkpoints use themselves; none may be a key of client_state."""


def content(parts: Parts, client_state: dict[str, Any], settings: SaveSettings) -> dict[str, Any]:
    """Everything of this engine that goes into a checkpoint, as arguments of `ckpt.save.prepare`.

    Collective over: all ranks.

    Raises:
        ReservedKey: on every rank, if `client_state` has a key that belongs to the checkpoint.
    """
    comm, options = parts.mesh.world.comm, parts.plan.config.checkpoint
    taken = sorted(RESERVED.intersection(client_state))
    problem = f"client_state has the keys {', '.join(taken)}, which the checkpoint itself uses; rename them"
    comm.agree(not taken, problem, ReservedKey)
    windows, whole = windows_of(parts), Whole.of(parts)
    slots = _slots(parts, windows)
    infos = whole.infos(_param_infos(parts, settings, numbers_by_name(parts, whole)))
    saved = {info.name for info in infos}
    has_frozen, coded = not settings.exclude_frozen_parameters, CodedTensors.of(parts, whole)
    aliases = whole.over_stages(tied_names(parts.module).items())
    return {
        "params": infos,
        "tensors": whole.tensors(tensors_of(parts, whole, windows, slots, has_frozen=has_frozen, coded=coded)),
        "aliases": {alias: name for alias, name in aliases if name in saved},
        "state": _state(parts, whole, windows, slots, client_state),
        "config_json": parts.plan.config.model_dump_json(),
        "rng": {**rng.capture(), **slice_streams()},
        "layout": {**parts.plan.axes, "stage": parts.plan.stage, "world_size": parts.plan.world_size},
        "options": SaveOptions(
            overwrite=settings.overwrite,
            save_latest=settings.save_latest,
            verify=options.read_back,
            writing=options.writing,
            files=options.files,
            window_bytes=max(options.window_bytes, schema.BLOCK_BYTES),
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            node_local=options.use_node_local_storage,
        ),
    }


def windows_of(parts: Parts) -> list[Window]:
    """The windows of the next update, of a rule that keeps its state itself; else none.

    Windows of what rests in swap files are gone when the next one is asked for; such rules have nothing there.
    """
    optimization = parts.optimization
    if optimization is None or not isinstance(optimization.rule, KeepsState):
        return []
    walker = Walker(parts.params, optimization.grads, optimization.states, per_parameter=optimization.rule.wants_whole)
    return list(walker.windows(optimization.groups, parts.counters.update_count))


def _slots(parts: Parts, windows: list[Window]) -> list[list[str]]:
    """Slot names of each parameter group that any rank holds.

    Collective over: all ranks, for rules that make their slots themselves.
    """
    if parts.optimization is None:
        return []
    groups, rule = parts.optimization.groups, parts.optimization.rule
    if not isinstance(rule, KeepsState):
        return [list(rule.state_names) for _ in groups]
    own: list[set[str]] = [set() for _ in groups]
    for window in windows:
        own[window.key[1]].update(rule.slots(window.key))
    everyone = parts.mesh.world.comm.gather_objects(own)
    return [sorted(set().union(*names)) for names in zip(*everyone, strict=True)]


def _param_infos(parts: Parts, settings: SaveSettings, numbers: Mapping[str, Mapping[str, float]]) -> list[ParamInfo]:
    infos = []
    step = parts.counters.update_count
    for name, param in parts.module.named_parameters():
        place = parts.table.find(param)
        if place is not None:
            compute = parts.params.dtypes(place.unit)[0]
            info = ParamInfo(name, tuple(param.shape), compute, "trainable", place.entry.group, step)
            infos.append(replace(info, scalars=dict(numbers.get(name, {}))))
        elif not settings.exclude_frozen_parameters:
            place = parts.table.locate(param)
            compute = param.dtype if place is None else parts.params.dtypes(place.unit)[0]
            infos.append(ParamInfo(name, tuple(param.shape), compute, "frozen", -1, 0))
    return infos


def _scalars(parts: Parts, windows: list[Window]) -> dict[str, Any]:
    """State that is no flat slot.

    One set per parameter group holds for every cut; where masters are whole there is also one per window, for rules
    whose scalars differ between parameters. Rules that keep numbers of parameters have these in `ParamInfo`.

    Collective over: all ranks, for rules that keep their state themselves and those that say what ranks exchange.
    """
    rule = parts.optimization.rule if parts.optimization else None
    if isinstance(rule, Exchanges) and not isinstance(rule, KeepsNumbers):
        # A stage, or a cut of it, may have nothing of some group.
        return {"by_group": {}, "by_window": merge_nested(parts.mesh.world.comm.gather_objects(rule.scalars()))}
    if not isinstance(rule, KeepsState):
        return {"by_group": {}, "by_window": {} if rule is None or isinstance(rule, KeepsNumbers) else rule.scalars()}
    own: dict[str, dict[str, Any]] = {}
    for window in windows:
        numbers = {name: _number(value) for name, value in rule.window_scalars(window.key).items()}
        own.setdefault(str(window.key[1]), {k: v for k, v in numbers.items() if v is not None})
    merged: dict[str, dict[str, Any]] = {}
    for groups in parts.mesh.world.comm.gather_objects(own):
        for group, values in groups.items():
            merged.setdefault(group, values)
    return {"by_group": merged, "by_window": rule.scalars() if has_windows_alike(parts) else {}}


def has_windows_alike(parts: Parts) -> bool:
    """True if windows are whole and the same on every rank, so that numbers can be kept by window."""
    return parts.params.placement.is_whole and parts.mesh["pipe", "model"].size == 1


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value


def _state(
    parts: Parts, whole: Whole, windows: list[Window], slots: list[list[str]], client_state: dict[str, Any]
) -> dict[str, Any]:
    """Everything that is no tensor. Collective over: all ranks."""
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
    optimization = parts.optimization
    if optimization is not None:
        members = whole.names_by_group(names_by_group(parts))
        state["optimizer"] = {
            "name": optimization.rule.name,
            "slots": sorted(set().union(*slots)),
            "scalars": _scalars(parts, windows),
            "param_groups": [
                {**{k: v for k, v in group.items() if k not in ("params", MASK)}, "params": members[index]}
                for index, group in enumerate(optimization.groups)
            ],
        }
        if optimization.coded is not None:
            state["optimizer"]["coded"] = optimization.coded.subject(counters.update_count)
    if isinstance(parts.module, PipelineModule):
        state["pipeline"] = {"micro_offset": parts.module.micro_offset}
    if parts.scheduler is not None:
        state["lr_scheduler"] = _plain_scheduler(parts.scheduler.state_dict())
    if parts.loader is not None:
        # Micro-batches since the last boundary left no trace but their gradients, which are not saved: replay them.
        state["data_sampler"] = parts.loader.state_dict(unused_batches=counters.pending_backwards)
    return state


def names_by_group(parts: Parts) -> list[list[str]]:
    """Names of the parameters of each group of the optimizer."""
    names = {id(param): name for name, param in parts.module.named_parameters()}
    members: list[list[str]] = [[] for _ in (parts.optimization.groups if parts.optimization else ())]
    for param, place in parts.table.places():
        members[place.entry.group].append(names[id(param)])
    return members


def slice_streams() -> dict[str, bytes]:
    """States of the streams of random numbers that differ between the slices of a layer, by kind of generator."""
    states = get_rng_tracker().get_states().items()
    return {f"{name}.{kind}": bytes(value.numpy()) for name, state in states for kind, value in state.items()}


def _plain_scheduler(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without callables (torch keeps lambdas out of it too, as None)."""
    return {key: value for key, value in state.items() if not callable(value)}
