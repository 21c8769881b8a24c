"""`initialize`: read the config, plan, compare plans between ranks, assemble the engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError, ScheduleError
from mpispeed.base.site_file import NONE, hold, read_for_job
from mpispeed.config.accept import accept
from mpispeed.config.elastic_batch import check_schedule, find_run_warnings
from mpispeed.config.load import LoadedConfig, read_source
from mpispeed.engine import features
from mpispeed.engine.agreement import configuring
from mpispeed.engine.attached import transform
from mpispeed.engine.blocks import take_blocks
from mpispeed.engine.build.assemble import assemble
from mpispeed.engine.distributed import DEFAULT_PORT, init_distributed
from mpispeed.engine.engine import Engine
from mpispeed.engine.experts import check_groups
from mpispeed.engine.hooks import Given, Setup
from mpispeed.engine.ownership import register, release
from mpispeed.engine.pipeline import PipelineEngine
from mpispeed.mesh.device_paths import choose, connect
from mpispeed.mesh.mesh import Mesh
from mpispeed.nn.sync_norm import release_norms
from mpispeed.nn.tensor.tensor_cut import forget_own_cuts
from mpispeed.optim.choice import kind_of
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.agreement import fingerprint, require_equal
from mpispeed.plan.axes import choose_axes
from mpispeed.plan.device import choose_device
from mpispeed.plan.placements import ranks_per_node
from mpispeed.plan.plan import Plan, make_plan
from mpispeed.plan.sequence_axis import RING, SEQUENCE
from mpispeed.plan.units import distinct_sizes
from mpispeed.watchdog import start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import nn

    from mpispeed.engine.build.parts import Parts
    from mpispeed.mesh.world import World


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` (and `--deepscale`, `--deepscale_config`) to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts that pass it; no effect")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """Make an engine of a model and a DeepSpeed-style config.

    Args:
        args: may carry `deepspeed_config`, the path of the JSON.
        model: the module to train; it is changed in place. An engine that holds it already is taken apart.
        optimizer: an optimizer over the model's parameters, or a callable that makes one; overrides the JSON.
        model_parameters: parameters or parameter groups; all trainable ones by default.
        training_data: a data set (map style or iterable) from which `engine.training_dataloader` is made.
        lr_scheduler: a scheduler, or a callable that makes one of the optimizer; overrides the JSON.
        distributed_port: as in `init_distributed`.
        mpu: the groups of ranks (get_data_parallel_group and so on) of a model that slices its layers itself; with the
            config's `tensor_parallel`, the groups over which layers are sliced. Not with a PipelineModule.
        dist_init_required: accepted; no effect.
        collate_fn: makes a batch of a list of samples; torch's by default.
        config: path, mapping, or base64 text; instead of `args.deepspeed_config`.
        mesh_param: a pair (ranks with samples of their own, ranks that share each sequence), instead of the keys
            data_parallel_size and sequence_parallel_size.
        config_params: the older name of `config`.

    Returns:
        (engine, optimizer, training_dataloader, lr_scheduler); absent members are None.

    Collective over: all ranks of the job.

    Raises:
        ConfigError: on every rank, with all mistakes of the config in one message.
    """
    if model is None:
        msg = "mpispeed.initialize: model is None; pass the torch module to train"
        raise ConfigError(msg)
    world = init_distributed(distributed_port=distributed_port)
    release(model, world.comm)
    with configuring(world.comm):
        check_groups(model)
    source = _shared_source(world, args, config if config is not None else config_params)
    loaded, plan = _resolve(world, source, model, (mpu, mesh_param), choose_device(world, model), optimizer)
    _adopt_local_rank(args, world.local_rank if plan.device.index is None else plan.device.index)
    plan, mesh = _mesh_of(world, plan, model)
    has_optimizer = optimizer is not None or plan.optimizer_name is not None
    given = Given(training_data, collate_fn, mpu, loaded.warnings, has_optimizer)
    setup = Setup(None, plan, mesh, given)
    _transform(model, setup)
    engine = _make_engine(assemble(setup, model, optimizer, model_parameters, lr_scheduler), model)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _mesh_of(world: World, plan: Plan, model: nn.Module) -> tuple[Plan, Mesh]:
    """The groups, and the plan with the ways of tensors between their ranks. Collective over: all ranks."""
    plan = plan.with_paths(choose(world, plan.device))
    mesh = Mesh(plan.topology(), world, reduction=plan.reduction)
    connect(mesh, plan.device, plan.paths, messages=("pipe", SEQUENCE, RING))
    if isinstance(model, PipelineModule):  # its stages and slices were made over groups of its own
        connect(model.grid.mesh, plan.device, plan.paths, messages=("pipe",))
    return plan, mesh


def _transform(model: nn.Module, setup: Setup) -> None:
    """Change the model as features ask, before its parameters are sharded. Collective over: all ranks."""
    try:
        transform(features.registered(), model, setup)
    except ConfigError:  # on all ranks
        release_norms(model)
        setup.mesh.close()
        raise


def _make_engine(parts: Parts, model: nn.Module) -> Engine:
    """An engine that is found later, watched, and begun.

    If it cannot be made, the model and the optimizer can be given to another `initialize`.

    Collective over: all ranks.
    """
    try:
        engine = PipelineEngine(model, parts) if isinstance(model, PipelineModule) else Engine(parts)
    except (ConfigError, ScheduleError):  # on all ranks
        parts.dismantle()
        raise
    register(engine)
    guard = parts.plan.config.guard
    start.attach(parts.bus, guard.divergence_timeout, guard.hang_timeout)
    parts.features.begun(engine)
    return engine


def _config_source(args: argparse.Namespace | None, config: Any) -> Any:
    old = getattr(args, "deepscale_config", None)
    path = getattr(args, "deepspeed_config", None)
    if old is not None and path is not None:
        msg = "both --deepscale_config and --deepspeed_config are given; keep --deepspeed_config"
        raise ConfigError(msg)
    path = path if path is not None else old
    if path is not None and config is not None:
        msg = f"a config is given twice: args.deepspeed_config ({path}) and the config argument; keep one"
        raise ConfigError(msg)
    source = path if path is not None else config
    if source is None:
        msg = "no config is given: pass --deepspeed_config FILE, or config= to mpispeed.initialize"
        raise ConfigError(msg)
    return source


def _shared_source(world: World, args: argparse.Namespace | None, config: Any) -> tuple[Any, str]:
    """The content of the config file as rank 0 read it, and its name; a mapping stays each rank's own.

    The site's defaults are those that rank 0 reads, too.

    Collective over: all ranks.
    """
    content, where = None, ""
    with configuring(world.comm):
        source = _config_source(args, config)
        if world.rank == 0 or isinstance(source, Mapping):
            content, where = read_source(source)
        site = read_for_job() if world.rank == 0 else NONE
    text, name, site = world.comm.share((content if isinstance(content, str) else None, where, site))
    hold(site)
    return (text, name) if text is not None else (content, where)


def _resolve(
    world: World,
    source: tuple[Any, str],
    model: nn.Module,
    grids: tuple[Any, Any],
    device: torch.device,
    optimizer: Any,
) -> tuple[LoadedConfig, Plan]:
    """Validate and plan; every rank comes to the same plan, or all raise. `grids` are mpu and mesh_param.

    Collective over: all ranks.
    """
    features.require_same(world.comm)
    content, where = source
    forget_own_cuts(model)
    node = ranks_per_node(world)
    with configuring(world.comm):
        loaded = accept(content, where)
        take_blocks(model, loaded.config)
    distinct = set[int]().union(*world.comm.gather_objects(distinct_sizes(model)))  # stages have different layers
    with configuring(world.comm):  # an mpu is read by all ranks or by none
        axes = choose_axes(loaded.config, world, model, *grids)
        dtype = _floating_dtype(model)
        kind = kind_of(optimizer, loaded.config.optimizer.type if loaded.config.optimizer else None)
        plan = make_plan(
            loaded.config, world.size, dtype, ranks_per_node=node, axes=axes, device=device, optimizer_kind=kind
        ).with_distinct(distinct)
        if loaded.config.elasticity.enabled:
            section = loaded.config.elasticity
            loaded.warnings.extend([*find_run_warnings(section, world.size), *check_schedule(section, os.environ)])
        own = fingerprint(plan, world.rank, model)
    require_equal(world.comm, world.comm.gather_objects(own), plan, model)
    return loaded, plan


def _floating_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of most floating-point elements of the model."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


def _adopt_local_rank(args: argparse.Namespace | None, number: int) -> None:
    """Set `args.local_rank` and LOCAL_RANK, which scripts read: the device's number or the local rank."""
    os.environ.setdefault("LOCAL_RANK", str(number))
    if args is not None and hasattr(args, "local_rank"):
        args.local_rank = number
