"""Slicing of a model's layers over the model axis, before an engine takes the model over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mpispeed.base import init_scope, rng
from mpispeed.base.errors import ConfigError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.sync_norm import synchronise_norms
from mpispeed.nn.tensor import cuts, inject
from mpispeed.nn.tensor.apply import Layers
from mpispeed.plan.own_slices import asks_for_slices, find_cut_twice, find_own_cuts, find_unplaced, is_marked
from mpispeed.sharding.init_slices import InitSlices
from mpispeed.sharding.sharded_init import find_init_shard

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan

log = logging.getLogger(__name__)

_SHOWN = 8  # ranks in a message


def fit_layers(plan: Plan, mesh: Mesh, model: nn.Module, *, has_mpu: bool = False) -> None:
    """Prepare a model's layers for several ranks: slice them where the config asks, and synchronise BatchNorms.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, as in `slice_layers`, or there is a SyncBatchNorm of a derived class.
    """
    slice_layers(plan, mesh, model, has_mpu=has_mpu)
    with mesh.world.comm.together(ConfigError):
        _refuse(synchronise_norms(model, mesh["data"]))


def slice_layers(plan: Plan, mesh: Mesh, model: nn.Module, *, has_mpu: bool = False) -> None:
    """Replace layers by slices of them if the config asks for it; else find the layers that the model sliced itself.

    Layers sliced before, by hand or by an earlier engine, stay. A pipeline stage may have nothing to slice, if another
    stage has.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if no layer of the model can be sliced, or layers are sliced otherwise already.
    """
    comm, asks = mesh["model"], asks_for_slices(plan.config)
    with mesh.world.comm.together(ConfigError):
        _refuse(_find_other_group(model, comm) or _find_sharded_elsewhere(mesh, model))
    if comm.size == 1:
        problem = "" if has_mpu else find_unplaced(mesh, model)
        mesh.world.comm.agree(not problem, problem, ConfigError)
        return
    tracker = rng.get_rng_tracker()
    if rng.MODEL_PARALLEL not in tracker.get_states():  # the default stream stays as the script has seeded it
        tracker.add(rng.MODEL_PARALLEL, plan.config.seed + rng.SLICE_OFFSET + comm.rank)
    if not asks:
        looks = not cuts(model) or any(map(is_marked, model.parameters()))
        if any(mesh["pipe"].gather_objects(looks)):  # all stages, as they compare what they find
            find_own_cuts(mesh, model)
        return
    problem = find_cut_twice(model, comm)
    mesh.world.comm.agree(not problem, problem, ConfigError)
    if not cuts(model):
        layers = InitSlices(model, mesh["data"], comm)
        with init_scope.paused():  # slices differ between the ranks over which zero.Init would shard them
            problem = _inject(plan, mesh, model, layers)
        layers.move(model)
    problems = mesh["pipe"].gather_objects(problem)
    if all(problems):
        raise ConfigError(problems[0])
    if mesh.rank == 0:
        for stage, text in enumerate(problems):
            if text:
                log.info("stage %d has no slices: %s", stage, text)


def _refuse(problem: str) -> None:
    if problem:
        raise ConfigError(problem)


def _inject(plan: Plan, mesh: Mesh, model: nn.Module, layers: Layers) -> str:
    """Slice the layers; return "" or the reason why nothing can be sliced.

    Collective over: the model axis, and the ranks over which `zero.Init` has sharded the model.
    """
    section = plan.config.tensor_parallel
    try:
        report = inject(
            model,
            mesh["model"].duplicate(),  # the layers outlive the engine, and its groups
            section.injection_policy_tuple,
            vocab=section.vocab_parallel,
            sequence_parallel=section.sequence_parallel,
            grain=section.tensor_parallel.tp_grain_size,
            layers=layers,
        )
    except ConfigError as error:
        return str(error)
    log.info("%s", report) if mesh.rank == 0 else log.debug("%s", report)
    return ""


def _find_other_group(model: nn.Module, comm: Comm) -> str:
    """A sentence if a layer is sliced over other ranks than those of `comm`, else ""."""
    whole = cuts(model)
    for path, module in model.named_modules() if whole else ():
        group = vars(module).get("comm")
        if isinstance(group, Comm) and list(group.ranks) != list(comm.ranks):
            return (
                f"layer {path} is cut over the {group.size} ranks {list(group.ranks)[:8]}, and the engine would have "
                f"slices on {list(comm.ranks)[:8]}; set tensor_parallel.autotp_size to {group.size} (or give the mpu "
                "of the layers), or build the model anew"
            )
    return ""


def _find_sharded_elsewhere(mesh: Mesh, model: nn.Module) -> str:
    """A sentence if `zero.Init` has sharded parameters over ranks that do not have the same of them, else ""."""
    builders, data = set(mesh["data", "model"].ranks), set(mesh["data"].ranks)
    known = cuts(model)
    for name, param in model.named_parameters():
        init_shard = find_init_shard(param)
        ranks = [] if init_shard is None else list(init_shard.sharded_init.ranks)
        if not set(ranks) <= builders:
            return (
                f"parameter {name} was cut over the ranks {ranks[:_SHOWN]} by zero.Init, and the ranks of its stage "
                f"are {sorted(builders)[:_SHOWN]}; give its layer as a LayerSpec, which each stage builds itself, "
                "or build it outside of zero.Init"
            )
        if name in known and known[name].kind != "replicated" and not set(ranks) <= data:
            return (
                f"parameter {name} is a slice of a layer and was cut over the ranks {ranks[:_SHOWN]} by zero.Init, and "
                f"its data ranks are {sorted(data)[:_SHOWN]}; build the model in zero.Init(data_parallel_group=...) "
                "with the group of these"
            )
    return ""
