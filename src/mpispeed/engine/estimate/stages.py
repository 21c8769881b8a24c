"""Predictions for models in pipeline stages and slices: what the first rank of every stage holds and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError, MpispeedError
from mpispeed.base.meta import without_memory
from mpispeed.engine.blocks import take_blocks
from mpispeed.engine.estimate.activations import Activations, measure
from mpispeed.engine.estimate.budget import Budget, gather_inputs, predict
from mpispeed.engine.estimate.expert_rows import expert_rows
from mpispeed.engine.experts import check_groups, share_out
from mpispeed.mesh.dry import DryWorld
from mpispeed.mesh.mesh import Mesh
from mpispeed.mesh.world import standing_in
from mpispeed.nn.tensor import cuts, inject
from mpispeed.pipe.module import PipelineModule
from mpispeed.pipe.process_topology import PipeModelDataParallelTopology
from mpispeed.plan.axes import choose_axes
from mpispeed.plan.own_slices import asks_for_slices
from mpispeed.plan.plan import make_plan
from mpispeed.plan.units import distinct_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpispeed.config.root import Config
    from mpispeed.exchange.cost import Sent
    from mpispeed.plan.plan import Plan

Source = nn.Module | Callable[[], Any]
"""A model that is not cut, or a function that builds what every rank builds: a module or a list of layers."""


@dataclass(frozen=True, slots=True)
class RankBudget:
    """The prediction for one rank of each pipeline stage: that of data coordinate 0 and slice 0, the largest slice.

    Attributes:
        number: of the stage.
        params: elements that the rank has of the model's parameters.
        has_slices: some of its layers are sliced.
        has_rows: rows to experts are counted.
        is_pipeline: the model is a `PipelineModule`, of one stage or several.
        activations: of a micro-batch; None: the length of samples is unknown.
    """

    number: int
    params: int
    budget: Budget
    is_pipeline: bool
    has_slices: bool
    has_rows: bool = False
    activations: Activations | None = None


def examine_stages(
    config: Config,
    ranks: int,
    ranks_per_node: int,
    source: Source,
    dtype: torch.dtype | None,
    *,
    in_scope: bool,
    sequence_length: int = 0,
) -> tuple[Plan, Sequence[RankBudget]]:
    """Plan of a run on `ranks` ranks, and the prediction for every stage. Nothing is allocated.

    Args:
        config: the settings.
        ranks: number of ranks.
        ranks_per_node: on every node; 0 if nodes differ.
        source: the model; it is built anew for every stage.
        dtype: that of the model; None: of most of its elements.
        in_scope: the model is built inside of zero.Init.
        sequence_length: tokens of a sample, for activations and rows to experts; 0: unknown.

    Raises:
        ConfigError: the settings are not possible for so many ranks, or the model cannot be cut so.
    """

    def examine_one(rank: int) -> tuple[Plan, RankBudget]:
        return examine_rank(
            config, ranks, ranks_per_node, rank, source, dtype, in_scope=in_scope, sequence_length=sequence_length
        )

    plan, first = examine_one(0)
    found, topology = [first], plan.topology()
    for number in range(1, plan.axes["pipe"]):
        rank = topology.rank(**{**dict.fromkeys(topology.names, 0), "pipe": number})
        own, one = examine_one(rank)
        found.append(one)
        plan = plan.with_distinct(set(own.placing.distinct) - set(plan.placing.distinct))  # a stage may have no experts
    if plan.axes["model"] > 1 and not any(one.has_slices for one in found):
        msg = (
            "no layer of any pipeline stage fits to tensor_parallel.injection_policy_tuple, or to a known architecture"
        )
        raise ConfigError(msg)
    return plan, found


def examine_rank(
    config: Config,
    ranks: int,
    ranks_per_node: int,
    rank: int,
    source: Source,
    dtype: torch.dtype | None,
    *,
    in_scope: bool,
    sequence_length: int,
) -> tuple[Plan, RankBudget]:
    """The plan, and the prediction for the rank `rank`, which builds `source`; arguments as for `examine_stages`.

    Raises:
        ConfigError: as `examine_stages`.
    """
    with _dry_rank(config, ranks, ranks_per_node, rank, source, dtype) as (plan, model, mesh, built):
        count = plan.batch.micro_batch_size * -(-sequence_length // plan.sequence.size)  # tokens of this rank
        micro_steps = plan.batch.gradient_accumulation_steps
        rows = expert_rows(model, mesh, count, plan.policy.compute, micro_steps) if count else []
        activations = measure(model, plan, mesh, sequence_length) if count else None
    is_sharded = in_scope and not plan.states.param.is_replicated
    budget = predict(gather_inputs(plan, model, is_init_sharded=is_sharded))
    if mesh["model"].size > 1:  # layers are whole until they are sliced
        budget = replace(budget, build_bytes=max(budget.build_bytes, built))
    exchanged = () if activations is None else activations.sent
    return plan, RankBudget(
        number=mesh.index("pipe"),
        params=sum(param.numel() for param in model.parameters()),
        budget=replace(budget, sent=(*budget.sent, *rows, *exchanged)),
        is_pipeline=isinstance(model, PipelineModule),
        has_slices=bool(cuts(model)),
        has_rows=count > 0,
        activations=activations,
    )


def activations_at(
    config: Config, ranks: int, ranks_per_node: int, source: Source, dtype: torch.dtype | None, sequence_length: int
) -> Activations:
    """Activations of rank 0 at another length of samples, without all else; arguments as for `examine_stages`.

    Raises:
        ConfigError: as `examine_stages`.
    """
    with _dry_rank(config, ranks, ranks_per_node, 0, source, dtype) as (plan, model, mesh, _):
        return measure(model, plan, mesh, sequence_length)


@contextmanager
def _dry_rank(
    config: Config, ranks: int, ranks_per_node: int, rank: int, source: Source, dtype: torch.dtype | None
) -> Iterator[tuple[Plan, nn.Module, Mesh, int]]:
    """Plan, model and mesh of a rank that nothing else stands by, and bytes of the model before it is sliced."""
    world = DryWorld(rank, ranks)
    try:
        with standing_in(world):
            model = _built(config, source, ranks)
            take_blocks(model, config)
            axes = choose_axes(config, world, model)
            own = dtype_of(model) if dtype is None else dtype
            plan = make_plan(config, ranks, own, ranks_per_node=ranks_per_node, axes=axes)
            plan = plan.with_distinct(distinct_sizes(model))
            mesh = Mesh(plan.topology(), world)
            built = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
            _slice(plan, mesh, model)
            check_groups(model)  # the model may be one that was examined before
            share_out(model, mesh)
            yield plan, model, mesh, built
    except ConfigError:
        raise
    except MpispeedError as error:
        raise ConfigError(str(error)) from error
    finally:
        world.close()


def has_loose_gathers(plan: Plan) -> bool:
    """True if a pipeline gathers parameters in every micro-batch, which follows its schedule and is only estimated."""
    return not plan.states.param.is_replicated and not plan.gathers_once


def open_points(plan: Plan, budget: RankBudget) -> list[str]:
    """Sentences on what a prediction leaves out or only estimates, for pipelines, slices, experts."""
    found = list(_on_activations(budget.activations))
    if plan.axes["pipe"] > 1:
        found.append("not counted: activations and their gradients that stages send each other, by the batch's shape")
    if plan.axes["model"] > 1:
        found.append("not counted: sums and gathers of activations over the slices of a layer, by the batch's shape")
    if plan.placing.distinct and budget.has_rows:
        found.append(
            "assumed for rows to experts: all experts get equally many, every sample has the given length, and "
            "activations are not recomputed, which would send them once more"
        )
    elif plan.placing.distinct:
        found.append("not counted: rows of tokens to experts on other ranks and back; give --sequence-length")
    if budget.is_pipeline and has_loose_gathers(plan):
        found.append(
            "estimated: gathers of parameters and the buffers for them, which follow the pipeline's schedule where "
            "they are made for every micro-batch; what rests on a rank is exact"
        )
    return found


def _on_activations(found: Activations | None) -> Iterator[str]:
    if found is None:
        return
    if found.refusal:
        yield f"not counted: activations {found.refusal}; give --activations"
        return
    yield (
        "counted as activations: every tensor that operations of the model make, while it lives; not what kernels need "
        "inside of themselves, and what Python, torch and MPI need"
    )
    if not found.has_loss:
        yield "not counted: the loss, because the model returns its outputs; return the loss when labels are given"


def by_axes(sent: Iterable[Sent]) -> dict[str, int]:
    """Bytes that one rank sends over each group of axes."""
    found: dict[str, int] = {}
    for row in sent:
        name = " ".join(row.axes)
        found[name] = found.get(name, 0) + row.bytes
    return found


def built_once(config: Config, source: Source, ranks: int) -> Source:
    """The model itself, if every rank builds the same; else `source`, for a model in pipeline stages or slices.

    Raises:
        ConfigError: the model cannot be built.
    """
    if asks_for_slices(config) or (config.pipeline.stages or 1) > 1:
        return source
    world = DryWorld(0, ranks)
    try:
        with standing_in(world):
            model = _built(config, source, ranks)
    finally:
        world.close()
    return source if isinstance(model, PipelineModule) else model


def _built(config: Config, source: Source, ranks: int) -> nn.Module:
    """The module that a rank would pass to `initialize`."""
    made = without_memory(lambda: _staged(config, source, ranks))
    if not isinstance(made, nn.Module):
        msg = f"the model is a {type(made).__name__}; expected a torch.nn.Module, or layers and pipeline.stages"
        raise ConfigError(msg)
    return made


def _staged(config: Config, source: Source, ranks: int) -> Any:
    """The model of a script; layers become a module of stages, if the config has any."""
    made = source if isinstance(source, nn.Module) else source()
    section = config.tensor_parallel
    stages, slices = config.pipeline.stages or 1, max(section.autotp_size, section.tensor_parallel.tp_size, 1)
    if stages == 1 or not isinstance(made, list | tuple | nn.Sequential):
        return made
    if ranks % (stages * slices):
        msg = f"{stages} pipeline stages of {slices} slices do not divide the {ranks} ranks"
        raise ConfigError(msg)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=slices, num_dp=ranks // stages // slices)
    return PipelineModule(made, topology=topology, partition_method=config.pipeline.partition)


def _slice(plan: Plan, mesh: Mesh, model: nn.Module) -> None:
    """Cut the layers to this rank's slices, if layers are shared."""
    if mesh["model"].size == 1 or (cuts(model) and not asks_for_slices(plan.config)):
        return
    if not asks_for_slices(plan.config):
        msg = (
            "layers that the model's own code slices are found by their values, and a plan has none; set "
            "tensor_parallel.autotp_size, or build the layers of mpispeed.nn.tensor"
        )
        raise ConfigError(msg)
    section = plan.config.tensor_parallel
    try:
        inject(
            model,
            mesh["model"],
            section.injection_policy_tuple,
            vocab=section.vocab_parallel,
            sequence_parallel=section.sequence_parallel,
            grain=section.tensor_parallel.tp_grain_size,
            without_values=True,
        )
    except ConfigError:
        if mesh["pipe"].size == 1:  # one of several stages may have nothing to slice
            raise


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most floating-point elements."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32
