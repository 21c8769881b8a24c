"""The optimizer step, a sequence of small parts that share a context, and the updates of a run made of such steps."""

from __future__ import annotations

import enum
import inspect
import logging
import math
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base import log as logs
from mpispeed.base.clock import Clock
from mpispeed.base.errors import StoreError, UsageError
from mpispeed.base.events import Event
from mpispeed.engine.facade import EngineOptimizer
from mpispeed.engine.rank_numbers import hand_out
from mpispeed.sharding.grad_shards import gather_numbers, global_square_sum
from mpispeed.sharding.param_shards import find_unbound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpispeed.base.device import Readback
    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.buffers import Buffers
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
    norm: float = math.nan  # global L2 norm of the averaged, unscaled gradients
    multiplier: float = 1.0  # factor of gradients in the update: unscales and clips
    skip: bool = False


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
        counters = self._counters
        total, (failed, idle, *wanted) = global_square_sum(
            self._mesh,
            self._grads.shards,
            threads=ctx.threads,
            counts=self._counts,
            notes=(counters.has_failed, not counters.pending_backwards, *(each.is_wanted() for each in self.numbers)),
        )
        if failed:
            raise BatchFailed
        self._look_at(idle)
        given = [each.give() if ranks else () for each, ranks in zip(self.numbers, wanted, strict=True)]
        if any(given):
            hand_out(self.numbers, given, gather_numbers(self._mesh, [*chain.from_iterable(given)]))
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

    def __init__(self, scaler: LossScale, mesh: Mesh, counters: Counters, grads: GradStore) -> None:
        self._scaler, self._mesh, self._counters, self._grads = scaler, mesh, counters, grads
        self._was_exhausted = False

    def __call__(self, ctx: StepContext) -> None:
        """Local: every rank decides alike."""
        self._scaler.update(ctx.skip)
        self._grads.rescale(self._scaler.scale / ctx.scale, is_overflow=ctx.skip)
        starts_failing = self._scaler.is_exhausted and not self._was_exhausted
        self._was_exhausted = self._scaler.is_exhausted
        if ctx.skip and self._mesh.rank == 0:
            step = self._counters.global_steps + 1
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
    """Run the update rule over this rank's windows."""

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
        if isinstance(self._optimizer, EngineOptimizer):
            self._optimizer.overflow = ctx.skip
        if not ctx.skip:
            for work in self.works(ctx):
                if self._update_windows.is_swapping:
                    self._together(work)
                else:
                    work()
            # torch's schedulers check this attribute for an update before their own step
            for optimizer in (self._optimizer, getattr(self._optimizer, "optimizer", None)):
                if isinstance(optimizer, torch.optim.Optimizer):
                    vars(optimizer)["_opt_called"] = True

    def works(self, ctx: StepContext) -> Sequence[Callable[[], None]]:
        """The phases of an update; with states in swap files, all ranks end one before the next."""
        return (lambda: self._update(ctx),)

    def _update(self, ctx: StepContext) -> None:
        # Closed, so that an exception in the rule does not keep windows borrowed.
        with closing(self._update_windows.windows(self._groups, ctx.step)) as windows:
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


class AdvanceLr:
    """Advance the learning-rate schedule, after applied steps only.

    A scheduler whose `step` requires one argument, other than `metrics`, gets the train batch size.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._signature = inspect.signature(scheduler.step)
        self._wants_batch_size = self._required() not in ([], ["metrics"]) and self._fits(0)

    def _required(self) -> list[str]:
        skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = self._signature.parameters.values()
        return [p.name for p in found if p.default is p.empty and p.kind not in skipped]

    def _fits(self, *values: Any, **keywords: Any) -> bool:
        try:
            self._signature.bind(*values, **keywords)
        except TypeError:
            return False
        return True

    def check(self, lr_kwargs: dict[str, Any]) -> None:
        """Check `lr_kwargs` before anything is changed.

        Raises:
            UsageError: the scheduler cannot be called with `lr_kwargs`.
        """
        if self._wants_batch_size or self._fits(**lr_kwargs):
            return
        name, missing = type(self._scheduler).__name__, [key for key in self._required() if key not in lr_kwargs]
        if missing:
            given = ", ".join(f'"{key}": ...' for key in missing)
            msg = f"{name}.step needs {', '.join(missing)}: call engine.step(lr_kwargs={{{given}}})"
        else:
            msg = f"{name}.step{self._signature} does not take lr_kwargs {sorted(lr_kwargs)}; leave them out"
        raise UsageError(msg)

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        if ctx.skip:
            return
        if self._fits(**ctx.lr_kwargs):
            self._scheduler.step(**ctx.lr_kwargs)
        else:
            self._scheduler.step(ctx.train_batch_size)


class CheckLrKwargs:
    """Refuse a step whose `lr_kwargs` the scheduler cannot take, before anything is changed."""

    def __init__(self, advance: AdvanceLr) -> None:
        self._advance = advance

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        self._advance.check(ctx.lr_kwargs)


# -- updates -------------------------------------------------------------------------------------------------------


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


_BEFORE: dict[Place, tuple[type, ...]] = {
    Place.START: (),
    Place.SUMMED: (MeasureNorm,),
    Place.CLIPPED: (ExchangeBefore, Update),
    Place.UPDATED: (Publish,),
    Place.PUBLISHED: (ClearGrads,),
}
"""Built-in parts of a step: a place is before the first of these; START before all."""


class Updates:
    """The updates of a run: runs the parts of a step, counts it and announces it.

    Attributes:
        losses: losses of the passes since the last update; their sum is that of the batch.
        was_applied: the last step changed parameters.
        norm: L2 norm of the gradients at the last applied step, before clipping, unscaled; None before the first.
    """

    def __init__(
        self,
        parts: Sequence[StepPart],
        scaler: LossScale,
        counters: Counters,
        bus: Bus,
        *,
        groups: list[dict[str, Any]],
        scheduler: Any | None = None,
        exchange: ExchangeStrategy | None = None,
        buffers: Buffers | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Args: `parts` of a step in order, to which those of `scheduler` are added; `groups` of hyper-parameters.

        `exchange` is told of the next update, if it is phased; `clock` is that of the engine.
        """
        self._parts, self._scaler, self._counters, self._bus = parts, scaler, counters, bus
        self._groups, self._buffers, self._clock = groups, buffers, clock or Clock()
        self._exchange = exchange if exchange is not None and exchange.is_phased else None
        self.losses: list[float | Readback] = []
        self.was_applied = False
        self.norm: float | None = None
        self._began = time.perf_counter()
        self.follow(scheduler)

    def follow(self, scheduler: Any | None) -> None:
        """Advance this learning-rate scheduler from now on instead of the one before; None: none."""
        kept = [part for part in self._parts if not isinstance(part, CheckLrKwargs | AdvanceLr)]
        if scheduler is not None and kept:
            advance = AdvanceLr(scheduler)
            kept = [CheckLrKwargs(advance), *kept, advance]
        self._parts = kept

    def insert(self, rows: Sequence[tuple[Place, StepPart]]) -> None:
        """Run parts of features from now on, at their places."""
        for place in Place:
            before = _BEFORE[place]
            at = next((index for index, part in enumerate(self._parts) if isinstance(part, before)), 0)
            self._parts = [*self._parts[:at], *(part for wanted, part in rows if wanted is place), *self._parts[at:]]

    def send_along(self, numbers: SentNumbers) -> None:
        """Let numbers of each rank follow the norm of gradients; call on all ranks alike."""
        for part in self._parts:
            if isinstance(part, MeasureNorm):
                part.numbers.append(numbers)

    def rates(self) -> list[Any]:
        """Learning rate of each parameter group."""
        return [group.get("lr", 0.0) for group in self._groups]

    def run(self, samples: int, lr_kwargs: dict[str, Any]) -> None:
        """Update, after the last micro-batch of a global batch of so many samples.

        Collective over: all ranks.

        Raises:
            UsageError: (on every rank) no rank has run a backward pass since the last update.
        """
        counters, start, rates, entering = self._counters, self._clock.now(), self.rates(), self._clock.entering
        self.was_applied = False
        ctx = StepContext(counters.update_count + 1, self._scaler.scale, samples, lr_kwargs)
        for part in self._parts:
            if entering is not None:
                entering(type(part).__name__)
            part(ctx)
        if self._buffers is not None:
            self._buffers.equalise()
        self.was_applied = not ctx.skip
        counters.end_batch(samples, is_skipped=ctx.skip)
        self.norm = self.norm if ctx.skip else ctx.norm
        now = time.perf_counter()
        update_seconds = now - start if self._clock.is_of_host else float(self._clock.now() - start)
        self._bus.announce(
            Event.STEP_END,
            global_step=counters.global_steps,
            samples=counters.global_samples,
            loss=sum(map(float, self.losses)) if self.losses else None,  # the loss of a direct pass is unknown
            lr=rates[0] if rates else 0.0,
            norm=ctx.norm,
            loss_scale=ctx.scale,
            skipped=ctx.skip,
            seconds=now - self._began,
            update_seconds=update_seconds,
        )
        self._began, self.losses = now, []
        if self._exchange is not None:
            self._exchange.begin(counters.update_count + 1)
