"""Gradients: from autograd into flat buckets, summed over ranks in plan order, accumulated under their placement."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from mpispeed.base.clock import Both
from mpispeed.base.errors import UsageError
from mpispeed.base.units import format_list
from mpispeed.mesh.deadlock import end_unmatched
from mpispeed.sharding.reducers import Backlog, Held, UnitGradient, limit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from mpispeed.mesh.collectives.work import Work
    from mpispeed.mesh.comm import Comm
    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.sharding.reducers import Reduction, SumChannel, SumGradients
    from mpispeed.store.layout import Entry, Table, Unit

NAMES_SHOWN = 8

_COMPLETE = (
    'reduction "invariant": the sums of this update are complete, and another backward pass begins; call engine.step() '
    "first, or let engine.backward see the boundary of the update (set_gradient_accumulation_boundary)"
)


class UnitExchange(Protocol):
    """The way in which ranks agree on the gradients of single units; `reducers.SumGradients` is the plain one."""

    @property
    def sums(self) -> SumGradients:
        """Sums over ranks in full precision, or of quantized messages."""

    @property
    def local_grads(self) -> bool:
        """True while gradients stay this rank's own, and each rank holds all of them."""

    @property
    def takes_units(self) -> bool:
        """True if units are taken as their gradients come, in the backward pass that was begun last."""

    @property
    def keeps_buckets(self) -> bool:
        """True if every bucket is taken as it is, and accumulators have nothing before the last pass."""

    def begin_backward(self, *, is_again: bool) -> None:
        """Prepare for one backward pass; `is_again`: gradients of this step have been taken already."""

    def take(self, unit: Unit, reduction: Reduction, *, squares: bool) -> None:
        """Agree on a unit; `squares`: its gradients are not added to any more."""

    def has_taken(self, unit: Unit) -> bool:
        """True if ranks have agreed on something that came out of the gradients, which cannot be set any more."""

    def clear(self) -> None:
        """Forget noted gradients, and units that no update has used."""

    def rescale(self, factor: float, *, is_overflow: bool) -> None:
        """Follow the loss scale, which was multiplied by `factor`; after an overflow if so."""


class GradStore:
    """Gradients of all units under one placement.

    Replicated: micro-steps add into full accumulators, and the sum over ranks is taken once, in the backward pass that
    `begin_backward` was told of. Sharded: every micro-step is summed over ranks and this rank's shard added to the
    accumulator. Sharded over a part of the data axes: sums are completed once, as `SumGradients` says. The target
    placement of `shards` may be sharded while gradients are replicated. `finish` sums what is left.

    Attributes:
        shards: the accumulators.
        is_open: a backward pass runs.
        has_gradients: a backward pass has ended since the last clear.
        reduces_now: units are summed in this backward pass.
        absent: units whose gradients are not expected, the same on all ranks: others do not wait for them. They are
            reduced at the end of a pass also where gradients come, so that the order hangs on nothing else.
    """

    def __init__(
        self, shards: GradShards, exchange: UnitExchange, channel: SumChannel, *, requires_all: bool = False
    ) -> None:
        """Start without gradients.

        Args:
            shards: the accumulators.
            exchange: agrees on units with other ranks.
            channel: says when it does.
            requires_all: `finish` refuses parameters that got no gradient.
        """
        self.shards, self.exchange, self.table = shards, exchange, shards.table
        self.sums = exchange.sums
        self.is_overlapped = channel.is_overlapped
        self._arena, self._channel, self._requires_all = shards.arena, channel, requires_all
        self._gathers = exchange.keeps_buckets  # sums are whole after the last pass only
        self._keeps = shards.table.shards_grads or self._gathers  # accumulators are no buckets
        self._gradients = [UnitGradient(unit.name) for unit in self.table.units]
        self._backlog = Backlog(limit_of(unit.layout.padded for unit in self.table.units))
        self._next = len(self.table.units) - 1
        self.is_open = False
        self._factor = 1.0
        self.has_gradients = False
        self._is_due = True
        self.reduces_now = True
        self.absent: frozenset[int] = frozenset()
        self.is_given_up = False  # gradients may be missing: they are going to be dropped
        self._stopwatch: AbstractContextManager[None] | None = None

    # -- one micro-step ------------------------------------------------------------------------------------

    def begin_backward(self, *, reduces: bool, factor: float = 1.0) -> None:
        """Prepare for one backward pass.

        Args:
            reduces: sums over ranks are due in it.
            factor: for gradients whose loss was not multiplied by it.
        """
        self._factor = factor
        is_again = any(gradient.is_averaged for gradient in self._gradients)
        if is_again and self._gathers:
            raise UsageError(_COMPLETE)
        self.exchange.begin_backward(is_again=reduces and is_again)
        reduces = reduces and self.exchange.takes_units
        self.reduces_now = reduces or self._keeps
        self.is_open, self._is_due = True, reduces
        self._next = len(self.table.units) - 1
        for unit, gradient in zip(self.table.units, self._gradients, strict=True):
            if gradient.is_averaged and (unit.states.last_sum or not self._keeps):
                # Local gradients added to an average would be counted once per rank.
                self._settle(unit)
                gradient.put_aside(self.shards.copied(unit))
            gradient.begin_micro_step()

    def land(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """Take one gradient from autograd; starts the unit's reduction when it was the last one missing.

        Raises:
            UsageError: no backward pass was begun, or the unit's gradients are already on their way in this one.
        """
        gradient = self._gradients[unit.index]
        if not self.is_open or gradient.is_launched:
            raise _untimely(unit, entry, is_open=self.is_open)
        self._fill(unit, gradient)
        self.sums.reducer.note(unit, entry, grad)
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        _write(gradient.view(entry), dense, self._factor, adds=entry.name in gradient.written)
        gradient.land(entry.name)
        if self.reduces_now:
            self._launch_ready()

    def has_landed(self, unit: Unit) -> bool:
        """True if every gradient of the unit has arrived in this backward pass."""
        return len(self._gradients[unit.index].landed) == len(unit.layout.entries)

    def _fill(self, unit: Unit, gradient: UnitGradient) -> None:
        """See to it that the unit has a bucket."""
        if gradient.bucket is not None:
            return
        if not self._keeps:
            gradient.use(self.shards.whole(unit), is_new=False)
            return
        bucket = self._arena.take(unit.layout.padded, unit.states.wire)
        for hole in unit.layout.holes():
            bucket[hole.slice].zero_()
        gradient.use(bucket, is_new=True)

    def _complement(self, unit: Unit, gradient: UnitGradient) -> None:
        """Fill the bucket with zeros for gradients that never came."""
        self._fill(unit, gradient)
        for entry in unit.layout.entries:
            if entry.name not in gradient.written:
                gradient.view(entry).zero_()

    def end_backward(self) -> None:
        """Reduce the units that are still waiting, with zeros for gradients that never came.

        Collective over: the data axis, when sums are due.
        """
        self.is_open = False
        self.has_gradients = True
        if self.reduces_now:
            self._launch_rest()

    # -- sums over ranks -------------------------------------------------------------------------------------

    def _launch_ready(self) -> None:
        """Start reductions in plan order, last unit first; a unit that is ready early waits for its turn."""
        while self._next >= 0:
            unit = self.table.units[self._next]
            if unit.index in self.absent:
                self._next -= 1
                continue
            if not self.has_landed(unit):
                return
            self._fill(unit, self._gradients[unit.index])
            self._launch(unit)

    def _launch_rest(self) -> None:
        for unit in reversed(self.table.units):
            gradient = self._gradients[unit.index]
            if not gradient.is_launched:
                self._complement(unit, gradient)
                self._launch(unit)

    def _launch(self, unit: Unit) -> None:
        self._next = unit.index - 1
        self._settle(unit)  # of the previous micro-step
        completes = self._is_due or not (unit.states.last_sum or self._gathers)
        reduction = self._gradients[unit.index].launch(keeps=self._keeps, completes=completes)
        squares = completes and self._is_due
        self._run(unit, reduction, lambda: self.exchange.take(unit, reduction, squares=squares))

    def _run(self, unit: Unit, reduction: Reduction, work: Callable[[], None]) -> None:
        """Do `work` in its turn on the channel, or at once."""
        if not self._channel.is_started:
            if self._stopwatch is None:
                work()
            else:
                with self._stopwatch:
                    work()
            self._wait_for(unit, reduction)
            return
        self._backlog.add(unit.layout.padded, lambda: self._wait_for(unit, reduction))
        reduction.work = self._channel.mesh["data"].start(
            lambda _: work(),
            "sum",
            label=f"unit {unit.index}",
            describe=lambda: f"the sum of the gradients of {unit.name!r}",
        )
        if not self.is_overlapped:
            self._wait_for(unit, reduction)

    def _settle(self, unit: Unit) -> None:
        """Wait for the reduction started for `unit`."""
        reduction = self._gradients[unit.index].reduction
        if reduction is not None:
            self._wait_for(unit, reduction)

    def _wait_for(self, unit: Unit, reduction: Reduction) -> None:
        def wait(work: Work) -> None:
            self._channel.wait(work, lambda: f"the sum of the gradients of {unit.name!r}")

        if self._stopwatch is None or reduction.work is None:
            reduction.settle(wait)
        else:
            with self._stopwatch:
                reduction.settle(wait)

    def time_sums(self, watch: AbstractContextManager[None]) -> Callable[[], None]:
        """From now on enter `watch` while this rank carries sums out itself, or waits for those that were started.

        Returns what ends that; who began last has to end first.
        """
        before = self._stopwatch
        self._stopwatch = watch if before is None else Both(before, watch)

        def end() -> None:
            self._stopwatch = before

        return end

    def finish(self, *, is_final: bool = True) -> None:
        """Complete all sums over ranks, starting those not started; `is_final`: no more gradients will come.

        Collective over: the data axis.

        Raises:
            UsageError: on every rank, if gradients of all parameters are required and one of a rank is missing.
            StoreError: on every rank, if swapped gradients of one could not be read or written.
        """
        is_local = self.exchange.local_grads
        if self.exchange.takes_units and (is_final or not is_local):
            self._sum_rest()
        for unit, gradient in zip(self.table.units if is_local else (), self._gradients, strict=False):
            if not gradient.is_averaged:
                self._complement(unit, gradient)
        self._backlog.clear()
        self.shards.drain()
        if self._requires_all:
            _require_all(self.table, () if self.is_given_up else self._gradients, self.shards.mesh["data"])

    def _sum_rest(self) -> None:
        self._is_due = True
        self._launch_rest()
        for unit in reversed(self.table.units):
            gradient = self._gradients[unit.index]
            if gradient.held is Held.PART:
                self._settle(unit)
                reduction = gradient.complete()
                self._run(unit, reduction, functools.partial(self.exchange.take, unit, reduction, squares=True))

    def clear(self) -> None:
        """Forget all gradients; the next one of each parameter overwrites."""
        self._backlog.clear()
        self.has_gradients = self.is_given_up = False
        self.exchange.clear()
        self.shards.forget_squares()
        for gradient in self._gradients:
            bucket = gradient.let_go()
            if bucket is not None and self._keeps:
                self._arena.give(bucket)
        self._gradients = [UnitGradient(unit.name) for unit in self.table.units]

    def end(self) -> None:
        """`pause` for good; gives sums up that others will never start, as ranks have diverged.

        Collective over: the data axis.
        """
        if self._channel.is_started:
            end_unmatched(self.shards.mesh, self._channel.mesh, "data")
        self.pause()

    def pause(self) -> None:
        """Wait for the sums that were started; afterwards only its stored tensor refers to an accumulator."""
        self._backlog.clear()
        for gradient in () if self._keeps else self._gradients:
            gradient.let_go()  # it is the accumulator, and is taken from there again

    def rescale(self, factor: float, *, is_overflow: bool) -> None:
        """Tell error feedback that the loss scale was multiplied by `factor`."""
        self.exchange.rescale(factor, is_overflow=is_overflow)


class GradHooks:
    """Post-accumulate hooks that hand every finished gradient to a `GradStore` and clear `param.grad`.

    Hooks keep neither this object nor the store alive: once one is gone, gradients stay with their parameters.
    """

    def __init__(self, table: Table, grads: GradStore, landed: Callable[[Unit], None] | None = None) -> None:
        """Args: `landed` is called with each unit whose gradients have all arrived."""
        self._table, self._store, self._landed = table, weakref.ref(grads), landed
        self._expect: Callable[[], Callable[[], None] | None] = lambda: None
        # Weak: the garbage collector does not see that autograd holds hooks, and could never collect what they hold.
        own = weakref.WeakMethod(self._carry)

        def hook(param: torch.Tensor) -> None:
            if (carry := own()) is not None:
                carry(param)

        self._handles = [param.register_post_accumulate_grad_hook(hook) for param, _ in table.places()]

    def deliver(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Hand on a gradient that autograd did not put into `param.grad`; nothing if `param` is not trained here."""
        grads, place = self._store(), self._table.find(param)
        if grads is None or place is None:
            return
        grads.land(place.unit, place.entry, grad)
        if self._landed is not None and grads.has_landed(place.unit):
            self._landed(place.unit)

    def listen(self, expect: Callable[[], None]) -> None:
        """Call the method `expect` before each gradient that autograd brings, as long as its object lives."""
        self._expect = weakref.WeakMethod(expect)

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _carry(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is not None and self._store() is not None:
            param.grad = None  # first: a gradient that is refused must not be added to the next one
            if (expect := self._expect()) is not None:
                expect()
            self.deliver(param, grad)


def is_summed(grads: GradStore) -> bool:
    """True if all gradients are there, and summed over ranks or about to be."""
    return grads.has_gradients and not grads.is_open and all(gradient.is_averaged for gradient in grads._gradients)


def _write(view: torch.Tensor, grad: torch.Tensor, factor: float, *, adds: bool) -> None:
    """Put a gradient times `factor`, computed in the dtype of `view`, into it."""
    if adds:
        view.add_(grad, alpha=factor)
        return
    view.copy_(grad)
    if factor != 1.0:
        view.mul_(factor)


def _untimely(unit: Unit, entry: Entry, *, is_open: bool) -> UsageError:
    """The error for a gradient that comes outside of a backward pass, or after its unit was reduced in it."""
    if is_open:
        return UsageError(
            f"a second gradient of parameter {entry.name!r} arrived after its unit {unit.name!r} was reduced in "
            "the same backward pass; checkpointed segments that share parameters need use_reentrant=False"
        )
    return UsageError(
        f"a gradient of parameter {entry.name!r} arrived outside of a backward pass of its engine; the backward passes "
        "of a pipeline are run by engine.train_batch(), not by loss.backward()"
    )


def _require_all(table: Table, gradients: Sequence[UnitGradient], comm: Comm) -> None:
    """Collective over: the group.

    Raises:
        UsageError: on every rank, if a parameter of one got no gradient since the last clear.
    """
    missing = _missing_sentence(table, gradients)
    comm.agree(not missing, missing, UsageError)


def _missing_sentence(table: Table, gradients: Sequence[UnitGradient]) -> str:
    """Names of parameters without a gradient since the last clear, as a sentence; empty if there are none."""
    names = [
        entry.name
        for unit, gradient in zip(table.units, gradients, strict=False)  # no gradients: nothing is asked for
        for entry in unit.layout.entries
        if entry.name not in gradient.seen
    ]
    if not names:
        return ""
    return (
        f"no gradient since the last step for {format_list(names, NAMES_SHOWN)}, and "
        "zero_optimization.ignore_unused_parameters is false; "
        "use each parameter in the loss of every rank, set requires_grad to False before initialize, or set the "
        "key to true"
    )
