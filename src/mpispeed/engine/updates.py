"""The updates of a run, made of the parts of `engine/step.py`; also those whose outcome the host learns a step later.

On a device a step does not wait for the norm of its gradients, where nothing but the host's own records needs it: the
factor of the update, and whether there is one, stay on the device, and the host reads them before it queues the next
update, or as soon as somebody asks. So it keeps its lead over the device, which never runs out of work between steps.
"""

from __future__ import annotations

import atexit
import math
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpispeed.base.clock import Clock
from mpispeed.base.device import mark
from mpispeed.base.events import Event, Late
from mpispeed.engine.rates import AdvanceLr, CheckLrKwargs, Rates
from mpispeed.engine.step import (
    AdjustScale,
    ClearGrads,
    ExchangeBefore,
    MeasureNorm,
    Place,
    Publish,
    StepContext,
    Update,
)
from mpispeed.optim.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.base.device import Readback
    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.buffers import Buffers
    from mpispeed.engine.rank_numbers import SentNumbers
    from mpispeed.engine.slot_losses import SlotLosses
    from mpispeed.engine.step import StepPart
    from mpispeed.exchange.strategy import ExchangeStrategy
    from mpispeed.precision.scaler import LossScale

_BEFORE: dict[Place, tuple[type, ...]] = {
    Place.START: (),
    Place.SUMMED: (MeasureNorm,),
    Place.CLIPPED: (ExchangeBefore, Update),
    Place.UPDATED: (Publish,),
    Place.PUBLISHED: (ClearGrads,),
}
"""Built-in parts of a step: a place is before the first of these; START before all."""


LAST_SECONDS = 1.0
"""How long an error of a program waits for the outcome of its last step."""


@dataclass(slots=True)
class _Pending:
    """A step of which not everybody knows yet.

    Attributes:
        ctx: its context.
        before: what its schedule has changed, if its outcome is not known.
        payload: of its events.
        is_last: no micro-batch has ended since.
    """

    ctx: StepContext
    before: Rates | None
    payload: Late | None = None
    is_last: bool = True


class Updates:
    """The updates of a run: runs the parts of a step, counts it and announces it.

    Attributes:
        losses: losses of the passes since the last update; their sum is that of the batch.
        leads: the host learns of a step's outcome before the next one, and does not wait for it in the step.
        slot_losses: those of all slots, where a micro-batch does not depend on its rank; else None.
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
        leads: bool = False,
    ) -> None:
        """Args: `parts` of a step in order, to which those of `scheduler` are added; `groups` of hyper-parameters.

        `exchange` is told of the next update, if it is phased; `clock` is that of the engine.
        `leads`: steps do not wait for a device, where features need no outcome either.
        """
        self._parts, self._scaler, self._counters, self._bus = parts, scaler, counters, bus
        self._groups, self._buffers, self._clock = groups, buffers, clock or Clock()
        self._exchange = exchange if exchange is not None and exchange.is_phased else None
        self.losses: list[float | Readback] = []
        self.slot_losses: SlotLosses | None = None
        self.leads = leads
        self._was_applied = False
        self._norm: float | None = None
        self._pending: _Pending | None = None
        self._settles_at_exit = False
        self._scheduler: Any | None = None
        counters.settle = self.settle
        self._began = time.perf_counter()
        self.follow(scheduler)

    def follow(self, scheduler: Any | None) -> None:
        """Advance this learning-rate scheduler from now on instead of the one before; None: none."""
        self.settle()
        self._scheduler = scheduler
        if isinstance(scheduler, Schedule):
            own = weakref.WeakMethod(self.settle)
            scheduler.settle = lambda: (settle := own()) is not None and settle()
        kept = [part for part in self._parts if not isinstance(part, CheckLrKwargs | AdvanceLr)]
        if scheduler is not None and kept:
            advance = AdvanceLr(scheduler)
            kept = [CheckLrKwargs(advance), *kept, advance]
        self._parts = kept

    def add_loss(self, loss: float | Readback) -> None:
        """Note the loss of a backward pass of the micro-batch that is at work."""
        self.losses.append(loss)
        if self.slot_losses is not None:
            self.slot_losses.add(self._counters.finished_micro_steps, loss)

    def insert(self, rows: Sequence[tuple[Place, StepPart]]) -> None:
        """Run parts of features from now on, at their places; those after the norm want to know it."""
        self.leads = self.leads and all(place in (Place.START, Place.SUMMED) for place, _ in rows)
        for place in Place:
            before = _BEFORE[place]
            at = next((index for index, part in enumerate(self._parts) if isinstance(part, before)), 0)
            self._parts = [*self._parts[:at], *(part for wanted, part in rows if wanted is place), *self._parts[at:]]

    def send_along(self, numbers: SentNumbers) -> None:
        """Let numbers of each rank follow the norm of gradients; call on all ranks alike."""
        for part in self._parts:
            if isinstance(part, MeasureNorm):
                part.numbers.append(numbers)

    @property
    def scheduler(self) -> Any | None:
        """The learning-rate scheduler, as it is after the last step. May wait for the device."""
        self.settle()
        return self._scheduler

    def rates(self) -> list[Any]:
        """Learning rate of each parameter group."""
        self.settle()
        return [group.get("lr", 0.0) for group in self._groups]

    @property
    def was_applied(self) -> bool:
        """The last step changed parameters. May wait for the device."""
        self.settle()
        return self._was_applied

    @was_applied.setter
    def was_applied(self, value: bool) -> None:
        self._was_applied = value
        if self._pending is not None:
            self._pending.is_last = False

    @property
    def norm(self) -> float | None:
        """L2 norm of the gradients at the last applied step, before clipping, unscaled; None before the first.

        May wait for the device.
        """
        self.settle()
        return self._norm

    def run(self, samples: int, lr_kwargs: dict[str, Any]) -> None:
        """Update, after the last micro-batch of a global batch of so many samples.

        Collective over: all ranks.

        Raises:
            UsageError: (on every rank) no rank has run a backward pass since the last update.
        """
        self.settle()
        counters, start, rates, entering = self._counters, self._clock.now(), self.rates(), self._clock.entering
        self._was_applied = False
        ctx = StepContext(counters.update_count + 1, self._scaler.scale, samples, lr_kwargs)
        ctx.number, ctx.is_ahead = counters.global_steps + 1, self.leads and Rates.fits(self._scheduler)
        before = Rates(self._scheduler, self._groups) if ctx.is_ahead else None
        for part in self._parts:
            if entering is not None:
                entering(type(part).__name__)
            part(ctx)
        if self._buffers is not None:
            self._buffers.equalise()
        counters.end_batch(samples, is_skipped=ctx.skip)
        now = time.perf_counter()
        elapsed = now - start if self._clock.is_of_host else self._clock.now() - start
        losses, self.losses = self.losses, []
        if self.slot_losses is not None:
            losses = [] if self.slot_losses.mean is None else [self.slot_losses.mean]
        pending = self._pending = _Pending(ctx, before)
        if before is not None and ctx.is_ahead:
            before.stepped()
            self._settle_at_exit()
        pending.payload = Late(
            {
                "global_step": counters.global_steps,
                "samples": counters.global_samples,
                "lr": rates[0] if rates else 0.0,
                "loss_scale": ctx.scale,
                "seconds": now - self._began,
            },
            {
                # the loss of a direct pass is unknown
                "loss": lambda: sum(map(float, losses)) if losses else None,
                "norm": lambda: self._known(ctx).norm,
                "skipped": lambda: self._known(ctx).skip,
                "update_seconds": lambda: float(elapsed),
            },
        )
        if not ctx.is_ahead:
            self._conclude(pending)
        self._bus.deliver(Event.STEP_END, pending.payload)
        if not (ctx.is_ahead and Rates.is_hidden(self._scheduler)):
            self.settle()
        self._began = now
        if self._exchange is not None:
            self._exchange.begin(counters.update_count + 1)

    def settle(self) -> None:
        """Learn how the last step ended, where that is not known, and announce it. May wait for the device. Local."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.ctx.is_ahead:
            self._look(pending)
            self._conclude(pending)
        if pending.payload is not None:
            self._bus.deliver(Event.STEP_KNOWN, pending.payload)

    def settle_at_last(self) -> None:
        """`settle` for a program that ends by an error, if the device answers within LAST_SECONDS. Local."""
        pending = self._pending
        if pending is None or pending.ctx.limbs is None:
            self.settle()
            return
        end, limit = mark(pending.ctx.limbs.device), time.monotonic() + LAST_SECONDS
        while not end.query():
            if time.monotonic() > limit:
                return
            time.sleep(0.01)
        self.settle()

    def _known(self, ctx: StepContext) -> StepContext:
        """The context of a step whose outcome is known."""
        if self._pending is not None and self._pending.ctx is ctx and ctx.is_ahead:
            self.settle()
        return ctx

    def _look(self, pending: _Pending) -> None:
        """Read the norm, and take back what was done as if there had been an update."""
        ctx = pending.ctx
        ctx.norm = float(ctx.found)
        ctx.skip = not math.isfinite(ctx.norm)
        if ctx.skip:
            self._counters.known_skips += 1
            if pending.before is not None:
                pending.before.put_back()
        for part in self._parts:
            if isinstance(part, AdjustScale | Update):
                part.conclude(ctx)

    def _conclude(self, pending: _Pending) -> None:
        ctx = pending.ctx
        self._was_applied = pending.is_last and not ctx.skip
        self._norm = self._norm if ctx.skip else ctx.norm

    def _settle_at_exit(self) -> None:
        """Let observers know the last step of a script that does not close its engine, before they end."""
        if not self._settles_at_exit:
            self._settles_at_exit = True
            own = weakref.WeakMethod(self.settle)
            atexit.register(lambda: (settle := own()) is not None and settle())
