"""Puts together what holds parameters: units, their stores, and what fetches those that rest cut."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError
from mpispeed.engine.facts import deal_units
from mpispeed.engine.swapping import is_swapping, open_tiers, plan_swap
from mpispeed.mesh.watch import Watch
from mpispeed.store.move import widen
from mpispeed.zero.external import watch_external
from mpispeed.zero.fetch import Fetcher, Limits
from mpispeed.zero.frames import Frames
from mpispeed.zero.leaf import is_leaf, mark_leaves_by_threshold
from mpispeed.zero.params import ParamStore
from mpispeed.zero.quantized import widen_quantized
from mpispeed.zero.union import Rounds
from mpispeed.zero.units import choose_resident
from mpispeed.zero.users import find_users

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from mpispeed.engine.plan import Plan
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.work import Wait
    from mpispeed.store.table import Table
    from mpispeed.zero.order import Order

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OrderWatch:
    """Tells when units are used in another order than in the pass before."""

    order: Order
    seen: int = 0

    def look(self) -> None:
        """Once in a pass."""
        new, self.seen = self.order.deviations - self.seen, self.order.deviations
        if new:
            log.warning(
                "%d times in the last pass parameters were used in another order than in the pass before; what comes "
                "after such a place is fetched ahead only from where the known order goes on", new,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sharding:
    """A model's parameters under an engine; `frames` is None where every parameter is whole all the time."""

    table: Table
    params: ParamStore
    frames: Frames | None
    watch: OrderWatch | None = None
    waits: Watch | None = None
    wait: Wait | None = None  # how started sums are waited for

    def unwinding(self) -> AbstractContextManager[None]:
        """A call into the model; when an exception ends it, nothing stays in use."""
        return nullcontext() if self.frames is None else self.frames.unwinding()

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """A time in which parts of the model run by themselves."""
        with self.unwinding(), nullcontext() if self.frames is None else self.frames.running(model):
            yield

    def end_backward(self) -> None:
        """A backward pass is over."""
        if self.frames is not None:
            self.frames.end_backward()
        if self.watch is not None:
            self.watch.look()

    def meet(self, call: str) -> None:
        """Wait until all ranks have made the same call; a rank that waits for something else instead is found out.

        Collective over: the data axis.

        Raises:
            AgreementError: on every rank, if ranks made different calls, or wait for each other.
        """
        data = self.params.mesh["data"]
        if self.waits is None or data.size == 1:
            return
        lane = self.params.mesh.lane("calls")
        work = lane["data"].start(lambda _: None, "call", label=call, describe=lambda: f"all ranks to call {call}")
        self.waits.wait(work, lambda: f"all ranks to call {call}")

    def remove(self) -> None:
        """Take hooks off and give parameters back whole.

        Collective over: the data axis.

        Raises:
            StoreError: on every rank, if swapped parameters of one cannot be read; all else is done all the same.
        """
        if self.frames is not None:
            self.frames.remove()
        try:
            self.params.give_back()
        finally:
            if self.waits is not None:
                self.waits.close()


def _take_over(
    plan: Plan,
    mesh: Mesh,
    model: nn.Module,
    group_of: Mapping[int, int],
    compute: torch.dtype | None,
    slots: Sequence[str],
    own_masters: bool,
) -> tuple[Table, ParamStore]:
    """Units, and the store that has their parameters now. Collective over: all ranks."""
    zero = plan.config.zero_optimization
    table = deal_units(plan, model, group_of)
    resident = choose_resident(table, zero.param_persistence_threshold, zero.model_persistence_threshold)
    tiers = open_tiers(plan, mesh, plan_swap(plan, mesh, table, resident, compute, slots))
    try:
        params = ParamStore(
            table,
            mesh,
            compute=compute,
            master=torch.float32,
            master_placement=plan.states.master,
            param_placement=plan.states.param,
            second=plan.states.second,
            resident=resident,
            widener=widen_quantized if zero.zero_quantized_weights else widen,
            codes_frozen=zero.zero_quantized_nontrainable_weights,
            own_masters=own_masters,
            tiers=tiers,
        )
        if is_swapping(plan):
            mesh.world.comm.agree(not tiers.problem, tiers.problem, StoreError)
    except BaseException:
        tiers.close()
        raise
    return table, params


def shard(
    plan: Plan,
    mesh: Mesh,
    model: nn.Module,
    group_of: Mapping[int, int],
    compute: torch.dtype | None,
    slots: Sequence[str] = (),
    *,
    own_masters: bool = False,
) -> Sharding:
    """Take over the parameters of `model`, cut and put on tiers as the plan says; `slots` name the optimizer's state.

    Collective over: all ranks.
    """
    zero = plan.config.zero_optimization
    table, params = _take_over(plan, mesh, model, group_of, compute, slots, own_masters)
    waits = Watch(mesh, "data")
    if mesh["data"].size > 1:
        mesh.lane("calls")
    wait = params.wait = waits.wait
    if params.is_all_resident:
        return Sharding(table, params, None, None, waits, wait if plan.is_overlapped else None)
    limits = Limits(
        ahead=zero.prefetch_bucket_size if plan.is_overlapped else 0,
        live=zero.max_live_parameters,
        reuse=zero.max_reuse_distance,
    )
    lane, rounds = mesh.lane("params"), None
    if zero.divergent_modules == "union":
        rounds = Rounds(lane, plan.states.param.axes, len(table.all_units), wait=wait)
    fetcher = Fetcher(params, lane, params.arena, limits, wait=wait, rounds=rounds)
    mark_leaves_by_threshold(model, zero.module_granularity_threshold)
    users = find_users(model, table, needs=lambda unit: not params.is_resident(unit), is_whole=is_leaf)
    frames = Frames(fetcher, users)
    watch_external(model, table, frames)
    params.fetcher, params.reader = fetcher, frames
    is_watched = zero.log_trace_cache_warnings and mesh.rank == 0
    return Sharding(table, params, frames, OrderWatch(fetcher.order) if is_watched else None, waits, wait)
