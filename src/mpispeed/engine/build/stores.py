"""Construction of units, the parameter store, the prefetcher and module hooks of sharded parameters, and reducers."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mpispeed.base import log as logs
from mpispeed.base.errors import StoreError
from mpispeed.engine.build.nvme_tiers import is_swapping, open_tiers, plan_swap
from mpispeed.engine.build.parts import OrderWatch, Sharding
from mpispeed.mesh.compressed.quantized import Feedback
from mpispeed.mesh.deadlock import Watch
from mpispeed.plan.units import deal_units
from mpispeed.sharding.collecting import Collector
from mpispeed.sharding.divergent_fetch import DivergentFetch
from mpispeed.sharding.external import watch_external
from mpispeed.sharding.grad_shards import GradShards
from mpispeed.sharding.leaf import is_leaf, mark_leaves_by_threshold
from mpispeed.sharding.module_hooks import ModuleHooks
from mpispeed.sharding.module_units import find_module_units
from mpispeed.sharding.param_shards import ParamShards
from mpispeed.sharding.params import ParamStore
from mpispeed.sharding.prefetch import Prefetcher
from mpispeed.sharding.quantized import QuantizedReducer, all_gather_quantized
from mpispeed.sharding.reducers import Averaging, PlainReducer, SumChannel, SumGradients
from mpispeed.sharding.sparse import RowReducer, find_tables
from mpispeed.store.tiers import GRAD
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from mpispeed.mesh.collectives.work import Wait
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan
    from mpispeed.sharding.reducers import Reducer
    from mpispeed.store.layout import Table

log = logging.getLogger(__name__)


def shard(
    plan: Plan,
    mesh: Mesh,
    model: nn.Module,
    group_of: Mapping[int, int],
    slots: Sequence[str] = (),
    *,
    own_masters: bool = False,
) -> Sharding:
    """Take over the parameters of `model`, sharded and on tiers as the plan says; `slots` name the optimizer's states.

    Collective over: all ranks.
    """
    zero = plan.config.zero_optimization
    table = deal_units(plan, model, group_of, own_masters=own_masters)
    with ExitStack() as undo:
        swap = plan_swap(plan, mesh, table, slots)
        tiers = open_tiers(plan, mesh, swap, table)
        undo.callback(tiers.close)
        shards = ParamShards(
            table,
            mesh,
            gather=all_gather_quantized if zero.zero_quantized_weights else all_gather_into,
            tiers=tiers,
            collector=Collector(plan.collecting, plan.device),
        )
        waits = Watch(mesh, "data")
        undo.callback(waits.close)
        if mesh["data"].size > 1:
            mesh.channel("calls")
        prefetcher, module_hooks = None, None
        if table.shards_params:
            prefetcher = _make_prefetcher(plan, mesh, shards, waits.wait)
            mark_leaves_by_threshold(model, zero.module_granularity_threshold)
            users = find_module_units(
                model, table, needs=lambda unit: not unit.states.param.is_replicated, is_whole=is_leaf
            )
            module_hooks = ModuleHooks(prefetcher, users)
            undo.callback(module_hooks.remove)
            watch_external(model, table, module_hooks)
        params = ParamStore(
            shards,
            rests_cut=not plan.states.param.is_replicated,
            prefetcher=prefetcher,
            reader=module_hooks,
            wait=waits.wait,
        )
        if is_swapping(plan):
            mesh.world.comm.agree(not tiers.problem, tiers.problem, StoreError)
        undo.pop_all()
    if prefetcher is None:
        return Sharding(table, params, None, None, waits, waits.wait if plan.is_overlapped else None)
    is_watched = zero.log_trace_cache_warnings and mesh.rank == 0
    return Sharding(
        table, params, module_hooks, OrderWatch(prefetcher.order) if is_watched else None, waits, waits.wait
    )


def _make_prefetcher(plan: Plan, mesh: Mesh, shards: ParamShards, wait: Wait) -> Prefetcher:
    """The prefetcher of sharded units. Collective over: all ranks."""
    zero = plan.config.zero_optimization
    channel, rounds = mesh.channel("params"), None
    if zero.divergent_modules == "union":
        rounds = DivergentFetch(channel, plan.states.param.axes, len(shards.table.all_units), wait=wait)
    return Prefetcher(shards, channel, shards.arena, plan.fetch_limits, wait=wait, rounds=rounds)


def make_sums(
    plan: Plan, mesh: Mesh, model: nn.Module, sharding: Sharding
) -> tuple[GradShards, SumGradients, SumChannel]:
    """Accumulators of gradients, their sums over ranks, and time and place of these.

    Collective over: all ranks, where sums are started.
    """
    params = sharding.params
    shards = GradShards(
        sharding.table,
        mesh,
        tiers=params.tiers,
        arena=params.arena,  # buffers of one size serve both
    )
    is_copied = any(params.tiers.is_apart(GRAD, unit.index) for unit in sharding.table.units)
    channel = SumChannel.of(mesh, is_overlapped=plan.is_overlapped, wait=sharding.wait, is_copied=is_copied)
    sums = SumGradients(
        shards,
        channel.mesh,
        Averaging.of(mesh["data"].size, is_prescaled=plan.is_prescaled, predivide=plan.predivide),
        reducer=choose_reducer(plan, model, sharding.table),
    )
    return shards, sums, channel


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
    if plan.placing.hops is None:
        text = (
            "zero_optimization.zero_quantized_gradients has no effect on one node: sums inside a node are not "
            "quantized (environment variable MPISPEED_RANKS_PER_NODE says how many ranks form a node)"
        )
        logs.once(log, logging.WARNING, text)
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
        inner, outer, PlainReducer(), feedback=None if loco is None else lambda: Feedback(loco.err_beta, loco.reset_T)
    )
