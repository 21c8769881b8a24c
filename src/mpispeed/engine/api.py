"""`initialize`: read, plan, agree, assemble."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import log as logs
from mpispeed.base.errors import ConfigError
from mpispeed.config.elastic_batch import check_schedule, find_run_warnings
from mpispeed.config.load import LoadedConfig, parse, read_source, validate
from mpispeed.config.unavailable import require_available
from mpispeed.engine import drilling, ending_run
from mpispeed.engine.assemble import assemble
from mpispeed.engine.axes import choose_axes
from mpispeed.engine.device import choose_device
from mpispeed.engine.engine import Engine
from mpispeed.engine.pipeline import PipelineEngine
from mpispeed.engine.placements import ranks_per_node
from mpispeed.engine.plan import Plan, make_plan
from mpispeed.engine.slicing import slice_layers
from mpispeed.guard import begin
from mpispeed.guard import logs as rank_logs
from mpispeed.mesh import exits
from mpispeed.mesh.mesh import Mesh
from mpispeed.mesh.topology import Topology
from mpispeed.mesh.world import start
from mpispeed.nn.tensor import cuts
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import nn

    from mpispeed.mesh.world import World


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` (and `--deepscale`, `--deepscale_config`) to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts that pass it; no effect")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> World:
    """Join MPI, once per process.

    Rank and size come from the communicator. `timeout`, a timedelta or seconds, is for how long ranks may wait for one
    that is in no operation, where that is longer than `guard.hang_timeout`. The other arguments are accepted for
    DeepSpeed scripts and have no effect.

    Collective over: all ranks of the job.
    """
    world = start()
    rank_logs.begin(world.rank)
    exits.keep_silent_errors(rank_logs.note)
    logs.setup(world.rank, world.size)
    begin.watch_over(world)
    if timeout is not None:
        begin.allow(hang_seconds=float(getattr(timeout, "total_seconds", lambda: timeout)()))
    return world


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
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
        model: the module to train; it is changed in place.
        optimizer: an optimizer over the model's parameters, or a callable that makes one; overrides the JSON.
        model_parameters: parameters or parameter groups; all trainable ones by default.
        training_data: a data set (map style or iterable) from which `engine.training_dataloader` is made.
        lr_scheduler: a scheduler, or a callable that makes one of the optimizer; overrides the JSON.
        distributed_port: accepted; no effect.
        mpu: knows the ranks' places (Megatron style: get_data_parallel_group and so on); for models that cut their
            layers themselves. With the config's `tensor_parallel` or a PipelineModule leave it out.
        dist_init_required: accepted; no effect.
        collate_fn: makes a batch of a list of samples; torch's by default.
        config: path, mapping, or base64 text; instead of `args.deepspeed_config`.
        mesh_param: must be None.
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
    if mesh_param is not None:
        msg = "mpispeed.initialize: mesh_param is not supported; sequence parallelism is not there yet, leave it out"
        raise ConfigError(msg)
    world = init_distributed()
    source = _shared_source(world, args, config if config is not None else config_params)
    loaded, plan = _resolve(world, source, model, mpu, choose_device(world, model))
    _adopt_local_rank(args, world.local_rank if plan.device.index is None else plan.device.index)
    mesh = Mesh(plan.topology(), world, reduction=plan.reduction)
    slice_layers(plan, mesh, model)
    given = optimizer, model_parameters, training_data, lr_scheduler
    parts = assemble(plan, loaded, mesh, model, *given, collate_fn=collate_fn)
    engine = PipelineEngine(parts, model) if isinstance(model, PipelineModule) else Engine(parts)
    drilling.attach(engine)
    begin.attach(engine.bus, plan.config.guard.divergence_timeout, plan.config.guard.hang_timeout)
    ending_run.attach(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


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
    """What rank 0 read of a file, so that all ranks parse the same bytes; a mapping stays each rank's own.

    Collective over: all ranks.
    """
    problem, content, where = "", None, ""
    try:
        source = _config_source(args, config)
        if world.rank == 0 or isinstance(source, Mapping):
            content, where = read_source(source)
    except ConfigError as error:
        problem = str(error)
    problems = [found for found in world.comm.gather_objects(problem) if found]
    if problems:
        raise ConfigError(problems[0])
    text, name = world.comm.share((content, where) if isinstance(content, str) else (None, where))
    return (text, name) if text is not None else (content, where)


def _resolve(
    world: World, source: tuple[Any, str], model: nn.Module, mpu: Any, device: torch.device
) -> tuple[LoadedConfig, Plan]:
    """Validate and plan; every rank comes to the same plan, or all raise.

    Collective over: all ranks.
    """
    content, where = source
    problem, digest, own, resolved = "", "", (0, ""), None
    node = ranks_per_node(world)
    loaded = _load_together(world, content, where)
    try:
        axes = choose_axes(loaded.config, world, model, mpu)
        dtype = _floating_dtype(model)
        plan = make_plan(loaded.config, world.size, dtype, ranks_per_node=node, axes=axes, device=device)
        resolved = loaded, plan
        if loaded.config.elasticity.enabled:
            section = loaded.config.elasticity
            loaded.warnings.extend([*find_run_warnings(section, world.size), *check_schedule(section, os.environ)])
        digest, own = resolved[1].digest(), _digest_of_stage(resolved[1], world.rank, model)
    except ConfigError as error:
        problem = str(error)
    outcomes = world.comm.gather_objects((problem, digest, own))
    _raise_first([outcome[0] for outcome in outcomes])
    first: dict[int, str] = {}  # along the pipe axis ranks have other parameters
    odd = [
        rank
        for rank, (_, found, (place, model_found)) in enumerate(outcomes)
        if found != outcomes[0][1] or first.setdefault(place, model_found) != model_found
    ]
    if odd or resolved is None:
        msg = (
            f"ranks {odd[:8]} have another plan than rank 0: the config or the model that is passed in code differs "
            "between ranks; build both from equal values everywhere"
        )
        raise ConfigError(msg)
    return resolved


def _digest_of_stage(plan: Plan, rank: int, model: nn.Module) -> tuple[int, str]:
    """The rank's stage, and a short hash of what is equal on all of its ranks: parameters, and their dtypes' policy."""
    whole = cuts(model)
    shapes = [
        (name, tuple(whole[name].shape if name in whole else param.shape), param.dtype)
        for name, param in model.named_parameters()
    ]
    stage = Topology(plan.axes).coords(rank)["pipe"]
    return stage, hashlib.sha256(repr((plan.policy, shapes)).encode()).hexdigest()[:16]


def _load_together(world: World, content: Any, where: str) -> LoadedConfig:
    """Validate this rank's config. Collective over: all ranks, which all raise if one has to."""
    problem = ""
    try:
        loaded = parse(content, where) if isinstance(content, str) else validate(content, where)
        require_available(loaded.config, loaded.where)
    except ConfigError as error:
        problem = str(error)
    _raise_first(world.comm.gather_objects(problem))
    return loaded


def _raise_first(problems: list[str]) -> None:
    """Raise the first rank's problem on every rank; says which rank it was if not all have one."""
    failed = [rank for rank, problem in enumerate(problems) if problem]
    if failed:
        first = problems[failed[0]]
        raise ConfigError(first if len(failed) == len(problems) else f"{first} (on rank {failed[0]})")


def _floating_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of most floating-point elements of the model."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


def _adopt_local_rank(args: argparse.Namespace | None, number: int) -> None:
    """`args.local_rank` is what scripts expect after initialize: the number of the own device, or of the rank."""
    os.environ.setdefault("LOCAL_RANK", str(number))
    if args is not None and hasattr(args, "local_rank"):
        args.local_rank = number
