"""Sizes of the axes, from the model, the config and an outside mpu, which must not contradict each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, TopologyError
from mpispeed.pipe.grid import AXES
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.mpu import axes_of

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.root import Config
    from mpispeed.mesh.world import World


def choose_axes(
    config: Config, world: World, model: nn.Module, mpu: Any = None, mesh_param: Any = None
) -> dict[str, int]:
    """Sizes of the axes pipe, data and model, slowest first, or in the order of a PipelineModule's topology.

    "sequence", the inner part of data, is among them where `mpu` or `mesh_param` has it. `mesh_param` is None or the
    pair (size of the batch axis, size of the sequence axis).

    Collective over: all ranks, if there is an `mpu`.

    Raises:
        ConfigError: two of them contradict each other, or the model does not support the sizes.
        TopologyError: the sizes do not divide the number of ranks.
    """
    axes = _choose(config, world, model, mpu)
    given: dict[str, int | None] = {"sequence_parallel_size": config.sequence_parallel_size}
    given["the mpu"] = axes.get("sequence")
    if mesh_param is not None:
        given["mesh_param"] = axes["sequence"] = _of_pair(mesh_param, axes)
    told = {what: size for what, size in given.items() if size is not None}
    if len(set(told.values())) > 1:
        text = " and ".join(f"{what} says {size}" for what, size in told.items())
        msg = f"{text} for the ranks that share each sequence; leave all but one of them out"
        raise ConfigError(msg)
    return axes


def _choose(config: Config, world: World, model: nn.Module, mpu: Any) -> dict[str, int]:
    wanted = _of_config(config)
    if isinstance(model, PipelineModule):
        topology = model.topology()
        order = [*topology.get_axis_names(), *(name for name in AXES if name not in topology.get_axis_names())]
        axes = {name: max(topology.get_dim(name), 1) for name in order}
        for key, name in (("pipeline.stages", "pipe"), ("tensor_parallel.autotp_size", "model")):
            if wanted[name] not in (None, axes[name]):
                msg = (
                    f"{key} is {wanted[name]}, but the PipelineModule was made for {axes[name]}; give the module "
                    f"topology=PipeModelDataParallelTopology(num_pp=..., num_mp=..., num_dp=...) or remove the key"
                )
                raise ConfigError(msg)
        if mpu is not None and mpu is not model.mpu():
            msg = "initialize(mpu=...) together with a PipelineModule: the module has an mpu of its own; leave it out"
            raise ConfigError(msg)
        return axes
    if (wanted["pipe"] or 1) > 1:
        msg = (
            f"pipeline.stages is {wanted['pipe']} and the model is a {type(model).__name__}: only layers in a row can "
            "be dealt to stages; pass mpispeed.pipe.PipelineModule(layers, num_stages=..., loss_fn=...)"
        )
        raise ConfigError(msg)
    if mpu is not None:
        return _of_mpu(mpu, world, wanted["model"])
    slices = wanted["model"] or 1
    if world.size % slices:
        sizes = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
        msg = f"tensor_parallel.autotp_size {slices} does not divide the {world.size} ranks; use one of {sizes}"
        raise TopologyError(msg)
    return {"pipe": 1, "data": world.size // slices, "model": slices}


def _of_pair(mesh_param: Any, axes: Mapping[str, int]) -> int:
    """Ranks of a sequence by the pair (batch ranks, sequence ranks)."""
    pair = tuple(mesh_param) if isinstance(mesh_param, Sequence) and not isinstance(mesh_param, str) else ()
    if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
        msg = (
            f"mpispeed.initialize: mesh_param is {mesh_param!r}; expected a pair of whole numbers: ranks with samples "
            "of their own, and ranks that share each sequence"
        )
        raise ConfigError(msg)
    if math.prod(pair) != axes["data"]:
        msg = (
            f"mpispeed.initialize: mesh_param {pair} makes {math.prod(pair)} ranks, and {axes['data']} have the same "
            "part of the model; their product has to be that number"
        )
        raise TopologyError(msg)
    return pair[1]


def _of_config(config: Config) -> dict[str, int | None]:
    section = config.tensor_parallel
    sizes = {size for size in (section.autotp_size, section.tensor_parallel.tp_size) if size > 1}
    if len(sizes) > 1:
        msg = (
            f"tensor_parallel.autotp_size is {section.autotp_size} and tensor_parallel.tensor_parallel.tp_size is "
            f"{section.tensor_parallel.tp_size}; keep one of them"
        )
        raise ConfigError(msg)
    return {"pipe": config.pipeline.stages, "model": sizes.pop() if sizes else None}


def _of_mpu(mpu: Any, world: World, slices: int | None) -> dict[str, int]:
    axes = dict(axes_of(mpu, world))
    if slices not in (None, axes.get("model", 1)):
        msg = f"tensor_parallel.autotp_size is {slices}, but the mpu has {axes.get('model', 1)} slices; remove the key"
        raise ConfigError(msg)
    if axes.get("pipe", 1) > 1:
        msg = (
            f"the mpu has {axes['pipe']} pipeline stages, and only a PipelineModule can be trained in stages here; "
            "pass one, which needs no mpu, or an mpu with one stage"
        )
        raise ConfigError(msg)
    return axes
