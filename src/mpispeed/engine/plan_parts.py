"""Stores, gathers and sums as a plan decides them, made alike for a run and for the dry run of `mpispeed plan`."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from mpispeed.base import log as logs
from mpispeed.mesh.compressed.quantized import Feedback
from mpispeed.sharding.collecting import Collector
from mpispeed.sharding.grad_shards import GradShards
from mpispeed.sharding.param_shards import ParamShards
from mpispeed.sharding.quantized import QuantizedReducer, all_gather_quantized
from mpispeed.sharding.reducers import Averaging, PlainReducer, SumChannel, SumGradients
from mpispeed.sharding.slot_sums import Leaves, SlotSums
from mpispeed.sharding.sparse import RowReducer, find_tables
from mpispeed.store.placement import Tier
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpispeed.mesh.collectives.work import Wait
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan
    from mpispeed.sharding.param_shards import UnitGather
    from mpispeed.sharding.reducers import Reducer
    from mpispeed.store.layout import Table
    from mpispeed.store.placement import Placement
    from mpispeed.store.tiers import Tiers

log = logging.getLogger(__name__)

_NOT_ON_ONE_NODE = (
    "zero_optimization.{} has no effect on one node: {} inside a node are not quantized, unless "
    "zero_optimization.zero_quantized_in_node is true (environment variable MPISPEED_RANKS_PER_NODE says how many "
    "ranks form a node)"
)

T = TypeVar("T", bound=ParamShards)


def make_shards(kind: type[T], plan: Plan, mesh: Mesh, table: Table, tiers: Tiers) -> T:
    """Parameters and masters, empty still. Local."""
    gather = _coded_gather(plan) if plan.config.zero_optimization.zero_quantized_weights else all_gather_into
    return kind(table, mesh, gather=gather, tiers=tiers, collector=Collector(plan.collecting, tiers.device))


def _coded_gather(plan: Plan) -> UnitGather:
    """Gathers in codes where a group has ranks of several nodes, or the config asks for it; else plain ones."""
    placed = plan.states.param
    if not placed.is_replicated and not plan.takes_codes(placed.axes):
        logs.once(log, logging.WARNING, _NOT_ON_ONE_NODE.format("zero_quantized_weights", "gathers"))
    takes_codes = cache(plan.takes_codes)

    def gather(
        mesh: Mesh, out: torch.Tensor, shard: torch.Tensor, source: Placement, target: Placement, padded: int
    ) -> None:
        over = tuple(axis for axis in source.axes if axis not in target.axes)
        (all_gather_quantized if takes_codes(over) else all_gather_into)(mesh, out, shard, source, target, padded)

    return gather


def make_sums(
    plan: Plan, params: ParamShards, reducer: Reducer, wait: Wait | None
) -> tuple[GradShards, SumGradients, SumChannel]:
    """Accumulators of gradients, their sums over ranks, and time and place of these.

    Args:
        plan: the plan.
        params: parameters of the same units; their arena serves both, because buffers have the same sizes.
        reducer: sums a bucket.
        wait: waits for started sums; None: they are started only where they run beside the backward pass.

    Collective over: all ranks, where sums are started.
    """
    mesh, tiers = params.mesh, params.tiers
    shards = GradShards(params.table, mesh, tiers=tiers, arena=params.arena)
    # From the plan: all ranks make a channel, also a stage with nothing to train. Dry runs move nothing.
    is_copied = tiers.device.type not in ("cpu", "meta") and plan.states.grad.tier is not Tier.DEVICE
    channel = SumChannel.of(mesh, is_overlapped=plan.is_overlapped, wait=wait, is_copied=is_copied)
    slots = plan.slots
    if slots is not None:
        passes = slots.per_rank if plan.axes["pipe"] == 1 else None

        def leaves_of(axes: tuple[str, ...]) -> Leaves:
            return Leaves(slots.leaves_of(mesh["data"].size // mesh[axes].size))

        return shards, SlotSums(shards, channel.mesh, slots.scale, leaves_of, passes=passes), channel
    averaging = Averaging.of(mesh["data"].size, is_prescaled=plan.is_prescaled, predivide=plan.predivide)
    return shards, SumGradients(shards, channel.mesh, averaging, reducer=reducer), channel


def choose_reducer(plan: Plan, model: nn.Module, table: Table) -> Reducer:
    """The reducer for `sparse_gradients` or `zero_quantized_gradients`; else plain sums."""
    plain = PlainReducer(scatters=plan.config.zero_optimization.reduce_scatter)
    if plan.config.sparse_gradients and plan.states.master.is_replicated:
        chosen = find_tables(model)
        names = {place.entry.name for param, place in table.places() if id(param) in chosen}
        if names:
            return RowReducer(names)
        text = "sparse_gradients has no effect: no nn.Embedding or nn.EmbeddingBag is trained"
        logs.once(log, logging.WARNING, text)
        return plain
    zero = plan.config.zero_optimization
    if not zero.zero_quantized_gradients:
        return plain
    hops = plan.placing.hops
    if hops is None or not plan.takes_codes(hops):
        logs.once(log, logging.WARNING, _NOT_ON_ONE_NODE.format("zero_quantized_gradients", "sums"))
        return plain
    if plan.placing.sum_hops is None:
        text = (
            "zero_optimization.zero_quantized_gradients has no effect on these nodes: states are not cut over them, as "
            "it needs"
        )
        logs.once(log, logging.WARNING, text)
        return plain
    loco = zero.zeropp_loco_param
    inner, outer = plan.placing.sum_hops
    return QuantizedReducer(
        inner,
        outer,
        PlainReducer(),
        feedback=None if loco is None else lambda: Feedback(loco.err_beta, loco.reset_T),
        codes_inner=plan.takes_codes(inner),
    )
