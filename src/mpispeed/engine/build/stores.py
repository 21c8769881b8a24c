"""Construction of units, the parameter store, the prefetcher and module hooks of sharded parameters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from mpispeed.base.errors import StoreError
from mpispeed.engine.build.nvme_tiers import is_swapping, open_tiers, plan_swap
from mpispeed.engine.build.parts import OrderWatch, Sharding
from mpispeed.engine.experts import require_alike
from mpispeed.engine.plan_parts import make_shards
from mpispeed.mesh.deadlock import Watch
from mpispeed.plan.units import deal_units
from mpispeed.sharding.divergent_fetch import DivergentFetch
from mpispeed.sharding.external import watch_external
from mpispeed.sharding.leaf import is_leaf, mark_leaves_by_threshold
from mpispeed.sharding.module_hooks import ModuleHooks
from mpispeed.sharding.module_units import find_module_units, needed_elements
from mpispeed.sharding.param_shards import ParamShards
from mpispeed.sharding.params import ParamStore
from mpispeed.sharding.prefetch import Prefetcher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from mpispeed.mesh.collectives.work import Wait
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan


def shard(
    plan: Plan,
    mesh: Mesh,
    model: nn.Module,
    group_of: Mapping[int, int],
    slots: Sequence[str] = (),
    *,
    own_masters: bool = False,
    slots_of: Mapping[int, tuple[str, ...]] | None = None,
) -> Sharding:
    """Take over the parameters of `model`, sharded and on tiers as the plan says; `slots` name the optimizer's states.

    `slots_of` is as for `plan.units.deal_units`.

    Collective over: all ranks.
    """
    zero = plan.config.zero_optimization
    table = deal_units(plan, model, group_of, own_masters=own_masters, slots_of=slots_of)
    if plan.placing.distinct:
        require_alike(table, mesh)
    with ExitStack() as undo:
        swap = plan_swap(plan, mesh, table, slots)
        tiers = open_tiers(plan, mesh, swap, table)
        undo.callback(tiers.close)
        shards = make_shards(ParamShards, plan, mesh, table, tiers)
        waits = Watch(mesh, "data")
        undo.callback(waits.close)
        if mesh["data"].size > 1:
            mesh.channel("calls")
        prefetcher, module_hooks = None, None
        if not plan.states.param.is_replicated and mesh["data"].size < mesh.size:
            mesh.channel("params")  # on all ranks: other stages and slices may shard parameters, and this one none
        if table.shards_params:
            mark_leaves_by_threshold(model, zero.module_granularity_threshold)
            users = find_module_units(
                model, table, needs=lambda unit: not unit.states.param.is_replicated, is_whole=is_leaf
            )
            prefetcher = _make_prefetcher(plan, mesh, shards, waits.wait, needed_elements(users))
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


def _make_prefetcher(plan: Plan, mesh: Mesh, shards: ParamShards, wait: Wait, need: int) -> Prefetcher:
    """The prefetcher of sharded units; `need` as of `needed_elements`. Collective over: all ranks."""
    zero = plan.config.zero_optimization
    channel, rounds = mesh.channel("params"), None
    if zero.divergent_modules == "union":
        rounds = DivergentFetch(channel, plan.states.param.axes, len(shards.table.all_units), wait=wait)
    return Prefetcher(shards, channel, shards.arena, plan.fetch_limits.by_need(need), wait=wait, rounds=rounds)
