"""The optimizer step as a tuple of small parts that share one context."""

from __future__ import annotations

import inspect
import logging
import math
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.engine.facade import EngineOptimizer
from mpispeed.zero.norm import global_square_sum
from mpispeed.zero.params import find_unbound

if TYPE_CHECKING:
    from mpispeed.engine.parts import Counters
    from mpispeed.engine.sharing import Sharing
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.precision.scaler import LossScale
    from mpispeed.zero.coded import CodedExchange
    from mpispeed.zero.grads import GradStore
    from mpispeed.zero.params import ParamStore
    from mpispeed.zero.walk import Walker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepContext:
    """What the parts of one step tell each other."""

    step: int  # number of this update if it is applied, from 1
    scale: float  # loss scale that was used in backward
    train_batch_size: int
    lr_kwargs: dict[str, Any] = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)
    norm: float = math.nan  # global L2 norm of the averaged, unscaled gradients
    multiplier: float = 1.0  # what the update multiplies gradients by: unscales and clips
    skip: bool = False


class StepPart(Protocol):
    """One part of the step."""

    def __call__(self, ctx: StepContext) -> None:
        """Do this part's work."""


class FinishReduce:
    """Complete the sums over ranks, most of which were started during backward."""

    def __init__(self, grads: GradStore) -> None:
        self._grads = grads

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        self._grads.finish()


class SumShared:
    """Add up gradients of weights that several stages or slices have in common, over these."""

    def __init__(self, grads: GradStore, sharing: Sharing) -> None:
        self._grads, self._sharing = grads, sharing

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the ranks that share them."""
        self._sharing.sum(self._grads)


class CheckParams:
    """Refuse a step whose result the model would not see."""

    def __init__(self, params: ParamStore) -> None:
        self._params = params

    def __call__(self, ctx: StepContext) -> None:
        """Local.

        Raises:
            UsageError: a parameter was given other data than the engine's.
        """
        name = find_unbound(self._params)
        if name:
            msg = (
                f"parameter {name!r} was given other data (param.data = ...) after initialize, which training would "
                "not change; write into it with `with mpispeed.zero.GatheredParameters(param, modifier_rank=0):` and "
                "param.copy_(...) under torch.no_grad(), or before initialize"
            )
            raise UsageError(msg)


class MeasureNorm:
    """Global norm and finite check in one pass; all ranks come to the same verdict.

    Of gradients that stay local it is the root mean square over data ranks of their own norms. That of their mean,
    which nobody has, is never larger: clipping by it clips no less, and all ranks clip alike.
    """

    def __init__(self, mesh: Mesh, grads: GradStore, sharing: Sharing) -> None:
        self._mesh, self._grads, self._sharing = mesh, grads, sharing

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: all ranks."""
        counts = self._sharing.is_counted
        total = global_square_sum(self._mesh, self._grads, threads=ctx.threads, counts=counts)
        if self._grads.is_local:
            total /= self._mesh["data"].size
        ctx.norm = math.sqrt(total) / ctx.scale if math.isfinite(total) else total
        ctx.skip = not math.isfinite(total)


class AdjustScale:
    """Tell the loss scale how the step went; gradients keep the scale that backward used."""

    def __init__(self, scaler: LossScale, mesh: Mesh, counters: Counters, grads: GradStore) -> None:
        self._scaler, self._mesh, self._counters, self._grads = scaler, mesh, counters, grads

    def __call__(self, ctx: StepContext) -> None:
        """Local: every rank has the same verdict."""
        self._scaler.update(ctx.skip)
        self._grads.rescale(self._scaler.scale / ctx.scale, is_overflow=ctx.skip)
        if ctx.skip and self._mesh.rank == 0:
            step = self._counters.global_steps + 1
            if self._scaler.dynamic:
                log.info("step %d skipped: gradient overflow, loss scale now %g", step, self._scaler.scale)
            else:
                log.warning("step %d skipped: a gradient is %s; parameters are unchanged", step, ctx.norm)


class ScaleAndClip:
    """One multiplier that unscales and clips; the update kernel applies it in its own pass."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, ctx: StepContext) -> None:
        """Local. Formula: min(1, limit / (norm + 1e-6)) / scale."""
        factor = min(1.0, self._limit / (ctx.norm + 1e-6)) if self._limit > 0 and not ctx.skip else 1.0
        ctx.multiplier = factor / ctx.scale


class ExchangeBefore:
    """Agree on momenta or gradients that travel through one bit."""

    def __init__(self, coded: CodedExchange) -> None:
        self._coded = coded

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        if ctx.skip:
            self._coded.drop()
        else:
            ctx.multiplier = self._coded.before_update(ctx.step, ctx.multiplier)


class ExchangeAfter:
    """Meet after local updates, where the rule says so."""

    def __init__(self, coded: CodedExchange) -> None:
        self._coded = coded

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        if not ctx.skip:
            self._coded.after_update(ctx.step)


class Update:
    """Run the update rule over this rank's windows."""

    def __init__(
        self, mesh: Mesh, rule: Rule, walker: Walker, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer
    ) -> None:
        self._mesh, self._rule, self._walker, self._groups, self._optimizer = mesh, rule, walker, groups, optimizer

    def __call__(self, ctx: StepContext) -> None:
        """Local; collective over all ranks where states may be swapped.

        Raises:
            StoreError: on every rank, if a swap file of one cannot be read or written.
        """
        if isinstance(self._optimizer, EngineOptimizer):
            self._optimizer.overflow = ctx.skip
        if not ctx.skip:
            if self._walker.is_swapping:
                self._update_together(ctx)
            else:
                self._update(ctx)
            # torch's schedulers look here to see that an update came before their own step
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _update(self, ctx: StepContext) -> None:
        # Closed, so that an exception in the rule does not keep windows borrowed.
        with closing(self._walker.windows(self._groups, ctx.step)) as windows:
            self._rule.update(windows, grad_scale=ctx.multiplier, threads=ctx.threads)

    def _update_together(self, ctx: StepContext) -> None:
        """What fails on one rank ends the step on all of them. Collective over: all ranks."""
        failure: Exception | None = None
        try:
            self._update(ctx)
        except Exception as error:
            failure = error
        problem = "" if failure is None else str(failure) or type(failure).__name__
        try:
            self._mesh[self._mesh.topology.names].agree(failure is None, problem, StoreError)
        except StoreError as told:
            if failure is None or isinstance(failure, StoreError):
                raise
            raise told from failure


class Publish:
    """Bring updated masters to where parameters rest."""

    def __init__(self, params: ParamStore) -> None:
        self._params = params

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the axes by which masters are cut."""
        if not ctx.skip:
            self._params.publish_all()


class ClearGrads:
    """Forget the gradients of this step."""

    def __init__(self, grads: GradStore) -> None:
        self._grads = grads

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        self._grads.clear()


class AdvanceLr:
    """Move the learning-rate schedule on, after applied steps only.

    A scheduler whose `step` has to be given one value, and which is not `metrics`, receives the train batch size.
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
        """Before anything is changed.

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
    """Refuse a step that the scheduler could not follow, while nothing is changed yet."""

    def __init__(self, advance: AdvanceLr) -> None:
        self._advance = advance

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        self._advance.check(ctx.lr_kwargs)
