"""Content of an engine's checkpoint: logical tensors, counters, generators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpispeed.base import rng
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import ReservedKey
from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.ckpt.write.request import SaveOptions
from mpispeed.engine.state.client_state import Kept, windows_of
from mpispeed.engine.state.global_layout import GlobalLayout
from mpispeed.engine.state.local_shards import tensors_of
from mpispeed.engine.state.onebit_state import CodedTensors, merge_nested, numbers_by_name
from mpispeed.nn.random import get_rng_tracker
from mpispeed.optim.exchange import Exchanges
from mpispeed.optim.rule import KeepsNumbers
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding.momenta import MASK
from mpispeed.sharding.units import tied_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.engine.build.parts import Parts


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
    parts.buffers.equalise(is_thorough=True)
    windows, whole = windows_of(parts), GlobalLayout.of(parts)
    kept = Kept.of(parts, windows)
    infos = whole.infos(_param_infos(parts, settings, numbers_by_name(parts, whole)))
    saved = {info.name for info in infos}
    has_frozen, onebit = not settings.exclude_frozen_parameters, CodedTensors.of(parts, whole)
    aliases = whole.over_stages(tied_names(parts.module).items())
    return {
        "params": infos,
        "tensors": whole.tensors(tensors_of(parts, whole, windows, kept.slots, has_frozen=has_frozen, onebit=onebit)),
        "aliases": {alias: name for alias, name in aliases if name in saved},
        "state": _state(parts, whole, kept, client_state),
        "config_json": parts.plan.config.model_dump_json(),
        "rng": {**rng.capture(), **slice_streams()},
        "layout": {**parts.plan.axes, "stage": parts.plan.stage, "world_size": parts.plan.world_size},
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
            compute = parts.params.shards.dtypes(place.unit)[0]
            info = ParamInfo(name, tuple(param.shape), compute, "trainable", place.entry.group, step)
            infos.append(replace(info, scalars=dict(numbers.get(name, {}))))
        elif not settings.exclude_frozen_parameters:
            place = parts.table.locate(param)
            compute = param.dtype if place is None else parts.params.shards.dtypes(place.unit)[0]
            infos.append(ParamInfo(name, tuple(param.shape), compute, "frozen", -1, 0))
    return infos


def _scalars(parts: Parts) -> dict[str, Any]:
    """Scalars of the rule; rules that keep scalars of each parameter have them in `ParamInfo`.

    Collective over: all ranks, for 1-bit optimizers.
    """
    rule = parts.optimization.rule if parts.optimization else None
    if rule is None or isinstance(rule, KeepsNumbers):
        return {}
    # A stage, or a shard of it, may have no parameter of some group.
    everyone = parts.mesh.world.comm.gather_objects(rule.scalars()) if isinstance(rule, Exchanges) else [rule.scalars()]
    return merge_nested(everyone)


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
    optimization = parts.optimization
    if optimization is not None:
        members = whole.names_by_group(names_by_group(parts))
        state["optimizer"] = {
            "name": optimization.rule.name,
            # rank 0 writes it, and its stage may train nothing
            "slots": sorted({*optimization.rule.state_names}.union(*kept.slots.values())),
            "scalars": {"of_params": kept.to_tree(), "of_rule": _scalars(parts)},
            "param_groups": [
                {**{k: v for k, v in group.items() if k not in ("params", MASK)}, "params": members[index]}
                for index, group in enumerate(optimization.groups)
            ],
        }
        if optimization.onebit is not None:
            state["optimizer"]["coded"] = optimization.onebit.subject(counters.update_count)
    if isinstance(parts.module, PipelineModule):
        state["pipeline"] = {"micro_offset": parts.module.micro_offset}
    if parts.scheduler is not None:
        state["lr_scheduler"] = _plain_scheduler(parts.scheduler.state_dict())
    if parts.loader is not None:
        # Micro-batches since the last boundary have changed only gradients, which are not saved: replay them.
        state["data_sampler"] = parts.loader.state_dict(unused_batches=counters.pending_backwards)
    return state


def names_by_group(parts: Parts) -> list[list[str]]:
    """Parameter names of each group of the optimizer."""
    names = {id(param): name for name, param in parts.module.named_parameters()}
    members: list[list[str]] = [[] for _ in (parts.optimization.groups if parts.optimization else ())]
    for param, place in parts.table.places():
        members[place.entry.group].append(names[id(param)])
    return members


def slice_streams() -> dict[str, bytes]:
    """States of the random streams that differ between the slices of a layer, by "stream.kind"."""
    states = get_rng_tracker().get_states().items()
    return {f"{name}.{kind}": bytes(value.numpy()) for name, state in states for kind, value in state.items()}


def _plain_scheduler(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without callables (torch keeps lambdas out of it too, as None)."""
    return {key: value for key, value in state.items() if not callable(value)}
