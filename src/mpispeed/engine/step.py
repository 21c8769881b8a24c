"""The optimizer step, a sequence of small parts that share a context; `engine/updates.py` runs them."""

from __future__ import annotations

import enum
import logging
import math
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base import log as logs
from mpispeed.base.device import start_reading
from mpispeed.base.errors import StoreError, UsageError
from mpispeed.engine.facade import EngineOptimizer
from mpispeed.engine.rank_numbers import hand_out
from mpispeed.native.device_clip import norm_and_factor
from mpispeed.optim.rule import TakesFactor
from mpispeed.sharding.grad_shards import gather_numbers, sum_apart, sum_squares
from mpispeed.sharding.param_shards import find_unbound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpispeed.base.device import Readback
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.rank_numbers import SentNumbers
    from mpispeed.engine.replica_groups import Sharing
    from mpispeed.exchange.strategy import ExchangeStrategy
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.precision.scaler import LossScale
    from mpispeed.sharding.grads import GradStore
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.update_windows import UpdateWindows
    from mpispeed.store.layout import Unit

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepContext:
    """Data shared by the parts of one step."""

    step: int  # number of this update if it is applied, from 1
    scale: float  # loss scale used in backward
    train_batch_size: int
    lr_kwargs: dict[str, Any] = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)
    number: int = 0  # of this step in the run, from 1
    norm: float = math.nan  # global L2 norm of the averaged, unscaled gradients
    multiplier: float = 1.0  # factor of gradients in the update: unscales and clips
    skip: bool = False
    is_ahead: bool = False  # norm and skip are known to the device only, and to the host after the step
    limbs: torch.Tensor | None = None  # then: the squares of gradients, summed over the ranks
    factor: torch.Tensor | None = None  # then: the multiplier, NaN where nothing is to be updated
    found: Readback | float = math.nan  # then: the norm on its way to the host


class BatchFailed(Exception):
    """A rank could not compute its gradients of this batch. Raised on all of them, before anything is changed."""


class StepPart(Protocol):
    """One part of the step."""

    def __call__(self, ctx: StepContext) -> None:
        """Do this part's work."""


class FinishReduce:
    """Complete the gradient reductions, most of which were started during backward."""

    def __init__(self, grads: GradStore) -> None:
        self._grads = grads

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        self._grads.finish()


class SumShared:
    """Sum gradients of shared weights over the stages or slices that share them."""

    def __init__(self, grads: GradStore, sharing: Sharing) -> None:
        self._grads, self._sharing = grads, sharing

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the ranks that share weights."""
        self._sharing.sum(self._grads)


class CheckParams:
    """Refuse a step whose result the model would not see."""

    def __init__(self, params: ParamStore) -> None:
        self._shards = params.shards

    def __call__(self, ctx: StepContext) -> None:
        """Local.

        Raises:
            UsageError: a parameter was given other data than the engine's.
        """
        name = find_unbound(self._shards)
        if name:
            msg = (
                f"parameter {name!r} was given other data (param.data = ...) after initialize, which training would "
                "not change; write into it with `with mpispeed.zero.GatheredParameters(param, modifier_rank=0):` and "
                "param.copy_(...) under torch.no_grad(), or before initialize"
            )
            raise UsageError(msg)


class MeasureNorm:
    """Global norm and finite check in one pass, with the same result on all ranks.

    For gradients that stay local it is the root mean square of the data ranks' norms. The norm of their mean, which no
    rank has, is never larger: clipping by the former clips no less, and all ranks clip alike.

    A rank whose batch has failed tells the others in the same message; what is due of `numbers` follows in another.
    """

    def __init__(self, mesh: Mesh, grads: GradStore, sharing: Sharing | None, counters: Counters) -> None:
        self._mesh, self._grads, self._counters = mesh, grads, counters
        self.numbers: list[SentNumbers] = []
        self._counts: Callable[[Unit], bool] = (lambda _: True) if sharing is None else sharing.is_counted

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: all ranks.

        Raises:
            UsageError: on every rank, if none has run a backward pass since the last update.
            BatchFailed: on every rank, if the batch of one has failed.
        """
        counters, shards = self._counters, self._grads.shards
        near, far = shards.square_limbs(filter(self._counts, shards.table.units), threads=ctx.threads)
        notes = (counters.has_failed, not counters.pending_backwards, *(each.is_wanted() for each in self.numbers))
        if ctx.is_ahead:
            # A rank may count no unit, and takes part in the same messages.
            far = near.to(shards.arena.device) if far is None else far
            ctx.limbs, counted = sum_apart(self._mesh, far, notes)
        else:
            total, counted = sum_squares(self._mesh, near, far, notes)
        failed, idle, *wanted = counted
        if failed:
            raise BatchFailed
        self._look_at(idle)
        given = [each.give() if ranks else () for each, ranks in zip(self.numbers, wanted, strict=True)]
        if any(given):
            hand_out(self.numbers, given, gather_numbers(self._mesh, [*chain.from_iterable(given)]))
        if ctx.is_ahead:
            return
        if self._grads.exchange.local_grads:
            total /= self._mesh["data"].size
        ctx.norm = math.sqrt(total) / ctx.scale if math.isfinite(total) else total
        ctx.skip = not math.isfinite(total)

    def _look_at(self, idle: int) -> None:
        ranks = self._mesh.size
        if idle == ranks:
            msg = (
                "engine.step() would update without any backward pass since the last update; call "
                "engine.backward(loss) before engine.step(), or leave the step out"
            )
            raise UsageError(msg)
        if idle and self._mesh.rank == 0:
            text = (
                f"{idle} of {ranks} ranks ran no backward pass before an update; their gradients count as "
                "zeros in the mean over ranks (if that is not meant, call engine.backward(loss) on all ranks)"
            )
            logs.once(log, logging.WARNING, text)


class AdjustScale:
    """Update the loss scale; gradients keep the scale used in backward."""

    def __init__(self, scaler: LossScale, mesh: Mesh, grads: GradStore) -> None:
        self._scaler, self._mesh, self._grads = scaler, mesh, grads
        self._was_exhausted = False

    def __call__(self, ctx: StepContext) -> None:
        """Local: every rank decides alike. Of a step that is ahead nothing is known yet: `Updates` concludes it."""
        if not ctx.is_ahead:
            self.conclude(ctx)

    def conclude(self, ctx: StepContext) -> None:
        """Take note of a step whose outcome is known. Local."""
        self._scaler.update(ctx.skip)
        self._grads.rescale(self._scaler.scale / ctx.scale, is_overflow=ctx.skip)
        starts_failing = self._scaler.is_exhausted and not self._was_exhausted
        self._was_exhausted = self._scaler.is_exhausted
        if ctx.skip and self._mesh.rank == 0:
            step = ctx.number
            if starts_failing:
                log.warning(
                    "step %d skipped: gradients overflow at the least loss scale, %g (fp16.min_loss_scale); the run "
                    "goes on and skips all such steps: lower the learning rate, clip gradients, or use bf16",
                    step,
                    self._scaler.scale,
                )
            elif self._scaler.dynamic:
                log.info("step %d skipped: gradient overflow, loss scale now %g", step, self._scaler.scale)
            else:
                log.warning("step %d skipped: a gradient is %s; parameters are unchanged", step, ctx.norm)


class ScaleAndClip:
    """Compute the multiplier that unscales and clips; the update kernel applies it in its own pass."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, ctx: StepContext) -> None:
        """Local. Formula: min(1, limit / (norm + 1e-6)) / scale."""
        if ctx.limbs is not None:
            norm, ctx.factor = norm_and_factor(ctx.limbs, scale=ctx.scale, limit=max(self._limit, 0.0))
            ctx.found = start_reading(norm)
            return
        factor = min(1.0, self._limit / (ctx.norm + 1e-6)) if self._limit > 0 and not ctx.skip else 1.0
        ctx.multiplier = factor / ctx.scale


class ExchangeBefore:
    """Exchanges that differ from step to step: what the update needs."""

    def __init__(self, exchange: ExchangeStrategy) -> None:
        self._exchange = exchange

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        if ctx.skip:
            self._exchange.drop()
        else:
            ctx.multiplier = self._exchange.before_update(ctx.step, ctx.multiplier)


class ExchangeAfter:
    """Exchanges that differ from step to step: what the update has left."""

    def __init__(self, exchange: ExchangeStrategy) -> None:
        self._exchange = exchange

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        if not ctx.skip:
            self._exchange.after_update(ctx.step)


class Update:
    """Run the update rule over this rank's windows.

    Attributes:
        agrees_itself: its works tell all ranks of failures without help.
    """

    agrees_itself = False

    def __init__(
        self,
        mesh: Mesh,
        rule: Rule,
        update_windows: UpdateWindows,
        groups: list[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._mesh, self._rule, self._update_windows, self._groups, self._optimizer = (
            mesh,
            rule,
            update_windows,
            groups,
            optimizer,
        )

    def __call__(self, ctx: StepContext) -> None:
        """Local; collective over all ranks if states are in swap files.

        Raises:
            StoreError: on every rank, if a swap file of one cannot be read or written.
        """
        self.conclude(ctx)
        if not ctx.skip:
            for work in self.works(ctx):
                if self._update_windows.is_swapping and not self.agrees_itself:
                    self._together(work)
                else:
                    work()
            # torch's schedulers check this attribute for an update before their own step
            for optimizer in (self._optimizer, getattr(self._optimizer, "optimizer", None)):
                if isinstance(optimizer, torch.optim.Optimizer):
                    vars(optimizer)["_opt_called"] = True

    def conclude(self, ctx: StepContext) -> None:
        """Tell the optimizer that scripts hold. Local."""
        if isinstance(self._optimizer, EngineOptimizer):
            self._optimizer.overflow = ctx.skip

    def works(self, ctx: StepContext) -> Sequence[Callable[[], None]]:
        """The phases of an update; with states in swap files, all ranks end one before the next."""
        return (lambda: self._update(ctx),)

    def _update(self, ctx: StepContext) -> None:
        # Closed, so that an exception in the rule does not keep windows borrowed.
        with closing(self._update_windows.windows(self._groups, ctx.step)) as windows:
            if ctx.factor is not None and isinstance(self._rule, TakesFactor):
                self._rule.update_by(windows, ctx.factor)
            else:
                self._rule.update(windows, grad_scale=ctx.multiplier, threads=ctx.threads)

    def _together(self, work: Callable[[], None]) -> None:
        """Run `work`; a failure on one rank ends the step on all. Collective over: all ranks."""
        with self._mesh[self._mesh.topology.names].together(StoreError, plain=Exception):
            work()


class Publish:
    """Copy updated masters to the parameters' placement."""

    def __init__(self, params: ParamStore) -> None:
        self._params = params

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the axes over which masters are sharded."""
        if not ctx.skip:
            self._params.publish_all()


class ClearGrads:
    """Drop the gradients of this step."""

    def __init__(self, grads: GradStore) -> None:
        self._grads = grads

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        self._grads.clear()


class Place(enum.Enum):
    """Places of a step at which a part of a feature can run; parts of one place run in the order of registration."""

    START = "start"
    """Before gradients are summed over ranks."""
    SUMMED = "summed"
    """Gradients are summed, their norm is not known yet."""
    CLIPPED = "clipped"
    """`ctx.norm`, `ctx.skip` and `ctx.multiplier` are known; no weight has changed yet."""
    UPDATED = "updated"
    """Masters are updated; parameters still have their old values."""
    PUBLISHED = "published"
    """Parameters have their new values; gradients are still there."""
