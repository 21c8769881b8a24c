"""Gradients: from autograd into flat buckets, summed over ranks in plan order, accumulated under their placement."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import UsageError
from mpispeed.base.units import format_list
from mpispeed.sharding.grad_buffers import GradBuffers
from mpispeed.sharding.reducers import Backlog, PlainReducer, Reducer, limit_of
from mpispeed.store.arena import Arena
from mpispeed.store.tiers import GRAD, IN_MEMORY, Tiers
from mpispeed.store.transfers import remaining_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpispeed.mesh.collectives.work import Wait, Work
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.layout import Entry
    from mpispeed.store.placement import Placement
    from mpispeed.store.table import Table, Unit

PARTIAL_AXES = ("data",)
"""Each data-parallel rank sees its own samples, so raw gradients are partial sums over this axis."""

NAMES_SHOWN = 8


@dataclass(slots=True)
class _UnitState:
    """Progress of a unit in the current micro-step and since the last clear."""

    bucket: torch.Tensor | None = None  # where gradients land in this micro-step
    views: dict[str, torch.Tensor] = field(default_factory=dict)  # the bucket's part of each entry, made when asked for
    landed: set[str] = field(default_factory=set)  # entries that arrived in this micro-step
    written: set[str] = field(default_factory=set)  # entries that hold a value since the last clear
    seen: set[str] = field(default_factory=set)  # entries that got a gradient since the last clear
    is_launched: bool = False  # all that landed in this micro-step is in a sum over ranks
    holds_sum: bool = False  # the accumulator at rest holds sums over ranks, all or the inner ones
    is_averaged: bool = False  # it holds sums over all ranks, averaged
    carried: torch.Tensor | None = None  # a finished sum that gradients of a later backward add to
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Averaging:
    """Factors around the sum over ranks: `g = after * sum(before * g)`; their product is 1 / ranks by default."""

    before: float
    after: float

    @classmethod
    def of(cls, ranks: int, *, is_prescaled: bool = False, predivide: float = 1.0) -> Averaging:
        """The factors of `prescale_gradients` and `gradient_predivide_factor`."""
        if is_prescaled:
            return cls(1.0 / ranks, 1.0)
        return cls(1.0 / predivide, predivide / ranks)


class GradStore(GradBuffers):
    """Gradients of all units under one placement.

    Replicated: micro-steps add into full accumulators, and the sum over ranks is taken once, in the backward pass that
    `begin_backward` was told of. Sharded: every micro-step is summed over ranks and this rank's shard added to the
    accumulator. Sharded over a part of the data axes: a micro-step is summed over these, and accumulators are summed
    over the others once (MiCS, arXiv 2205.00119, two-hop synchronization). `target` is the placement in which the sum
    is needed: it may be sharded while the gradients are replicated. `finish` sums what is left.
    """

    def __init__(
        self,
        table: Table,
        mesh: Mesh,
        *,
        rest: Placement,
        target: Placement,
        accumulate: torch.dtype,
        communicate: torch.dtype | None,
        averaging: Averaging,
        is_overlapped: bool,
        scatters: bool = True,
        requires_all: bool = False,
        reducer: Reducer | None = None,
        wait: Wait | None = None,
        tiers: Tiers = IN_MEMORY,
        arena: Arena | None = None,
    ) -> None:
        """Start without gradients.

        Args:
            table: the units.
            mesh: the ranks.
            rest: placement of the accumulators.
            target: placement of the sums; `rest` itself, or any sharded one if `rest` is replicated.
            accumulate: dtype of accumulators.
            communicate: dtype of messages; None: that of each unit's parameters.
            averaging: factors around the sum over ranks.
            is_overlapped: sums run beside the backward pass.
            scatters: False: buckets are all-reduced, and each rank takes its range.
            requires_all: `finish` refuses parameters that got no gradient.
            reducer: sums a bucket over the axes of sharding (the data axis if replicated); plain sums by default.
            wait: waits for started sums; if given, sums that are not overlapped are started too, so that it sees them.
            tiers: the sharded accumulators that are in swap files.
            arena: gives buckets; its own by default.
        """
        self.averaging = averaging
        self._accumulate, self._communicate, self._requires_all = accumulate, communicate, requires_all
        super().__init__(table, mesh, rest, target, self.dtype, tiers)
        # A single rank has no peers, but gradients may have to be copied to the host.
        self.is_overlapped = is_overlapped and (mesh["data"].size > 1 or tiers.is_apart(GRAD))
        self.arena = Arena(tiers.device) if arena is None else arena
        outer = remaining_axes(mesh, target, PARTIAL_AXES)
        self._outer = outer if not rest.is_replicated and mesh.topology.group_size(outer) > 1 else ()
        partial = target.axes if self._outer else PARTIAL_AXES
        self._reducer = reducer or PlainReducer(partial, target, scatters=scatters)
        self._is_started = self.is_overlapped or (wait is not None and mesh["data"].size > 1)
        self._wait_for: Wait = wait or (lambda work, _: work.wait())
        self._channel = mesh.channel("grads") if self._is_started else mesh
        self._states = [_UnitState() for _ in table.units]
        self._backlog = Backlog(limit_of(unit.layout.padded for unit in table.units))
        self._next = len(table.units) - 1
        self.is_open = False  # a backward pass runs
        self._factor = 1.0
        self.has_gradients = False  # a backward pass has ended since the last clear
        self._is_due = True
        self.reduces_now = True
        self.is_given_up = False  # gradients may be missing: they are going to be dropped

    def dtype(self, unit: Unit) -> torch.dtype:
        """The dtype in which gradients of the unit are accumulated."""
        return torch.float64 if unit.dtype == torch.float64 else self._accumulate

    # -- one micro-step ------------------------------------------------------------------------------------

    def begin_backward(self, *, reduces: bool, factor: float = 1.0) -> None:
        """Prepare for one backward pass.

        Args:
            reduces: sums over ranks are due in it.
            factor: for gradients whose loss was not multiplied by it.
        """
        self._factor = factor
        self._choose_early(is_again=reduces and any(state.is_averaged for state in self._states))
        reduces = reduces and (self.is_early or not self.is_local)
        self.reduces_now = reduces or not self.rest.is_replicated
        self.is_open, self._is_due = True, reduces
        self._next = len(self.table.units) - 1
        for unit, state in zip(self.table.units, self._states, strict=True):
            state.landed.clear()
            if state.is_averaged and (self.rest.is_replicated or self._outer):
                self._carry(unit, state)
            state.is_launched = False

    def _carry(self, unit: Unit, state: _UnitState) -> None:
        """Put a sum over ranks aside: local gradients added to it would be counted once per rank."""
        self._settle(unit, state)
        state.carried = self.copied(unit)
        state.written.clear()
        state.holds_sum = state.is_averaged = False

    def land(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """Take one gradient from autograd; starts the unit's reduction when it was the last one missing.

        Raises:
            UsageError: no backward pass was begun, or the unit's gradients are already on their way in this one.
        """
        state = self._states[unit.index]
        if not self.is_open or state.is_launched:
            raise _untimely(unit, entry, is_open=self.is_open)
        view = state.views.get(entry.name)
        if view is None:
            view = self._bucket(unit, state)[entry.span.slice].view(entry.shape)
            state.views[entry.name] = view
        self._reducer.note(unit, entry, grad)
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        _write(view, dense, self._factor, adds=entry.name in state.written)
        for names in (state.written, state.landed, state.seen):
            names.add(entry.name)
        if self.reduces_now:
            self._launch_ready()

    def has_landed(self, unit: Unit) -> bool:
        """True if every gradient of the unit has arrived in this backward pass."""
        return len(self._states[unit.index].landed) == len(unit.layout.entries)

    def _bucket(self, unit: Unit, state: _UnitState) -> torch.Tensor:
        if state.bucket is None:
            if self.rest.is_replicated:
                state.bucket = self.whole(unit)
            else:
                state.bucket = self.arena.take(unit.layout.padded, self.wire_dtype(unit))
                for hole in unit.layout.holes():
                    state.bucket[hole.slice].zero_()
                state.written.clear()
        return state.bucket

    def end_backward(self) -> None:
        """Reduce the units that are still waiting, with zeros for gradients that never came.

        Collective over: the data axis, when sums are due.
        """
        self.is_open = False
        self.has_gradients = True
        if self.reduces_now:
            self._launch_rest()

    def _launch_rest(self) -> None:
        for unit in reversed(self.table.units):
            state = self._states[unit.index]
            if state.is_launched:
                continue
            self._launch(unit, state, self._filled(unit, state))

    def _filled(self, unit: Unit, state: _UnitState) -> torch.Tensor:
        """The bucket, with zeros for gradients that never came."""
        bucket = self._bucket(unit, state)
        for entry in unit.layout.entries:
            if entry.name not in state.written:
                bucket[entry.span.slice].zero_()
        return bucket

    # -- sums over ranks -------------------------------------------------------------------------------------

    def _launch_ready(self) -> None:
        """Start reductions in plan order, last unit first; a unit that is ready early waits for its turn."""
        while self._next >= 0:
            unit = self.table.units[self._next]
            state = self._states[unit.index]
            if len(state.landed) < len(unit.layout.entries):
                return
            self._launch(unit, state, self._bucket(unit, state))

    def _launch(self, unit: Unit, state: _UnitState, bucket: torch.Tensor) -> None:
        self._next = unit.index - 1
        state.is_launched = True
        state.bucket = None
        state.views.clear()
        adds = state.holds_sum and not self.rest.is_replicated
        completes = self._is_due or not self._outer
        carried = state.carried if completes else None
        state.holds_sum, state.is_averaged = True, completes
        if completes:
            state.carried = None
        squares = completes and self._is_due
        self._run(
            unit, state, lambda: self._reduce(unit, bucket, carried, adds=adds, completes=completes, squares=squares)
        )

    def _run(self, unit: Unit, state: _UnitState, work: Callable[[], None]) -> None:
        """Do `work` in its turn on the channel, or at once."""
        if not self._is_started:
            work()
            return
        self._settle(unit, state)  # of the previous micro-step
        self._backlog.add(unit.layout.padded, functools.partial(self._settle, unit, state))
        state.work = self._channel["data"].start(
            lambda _: work(),
            "sum",
            label=f"unit {unit.index}",
            describe=lambda: f"the sum of the gradients of {unit.name!r}",
        )
        if not self.is_overlapped:
            self._settle(unit, state)

    def _settle(self, unit: Unit, state: _UnitState) -> None:
        """Wait for the reduction started for `unit`."""
        if state.work is not None:
            self._wait_for(state.work, lambda: f"the sum of the gradients of {unit.name!r}")
            state.work = None

    def _reduce(
        self, unit: Unit, bucket: torch.Tensor, carried: torch.Tensor | None, *, adds: bool, completes: bool,
        squares: bool,
    ) -> None:  # fmt: skip
        """Sum a bucket; on the channel's progress thread when overlapped, so it touches only this unit's buffers."""
        if self.is_early:
            self._code(unit, bucket)
            return
        before, after = self.averaging.before, 1.0 if self._outer else self.averaging.after
        wire = _scaled(bucket, before, self.wire_dtype(unit), self.arena)
        target = self.begin(unit, reads=adds)
        if adds:
            wide = torch.promote_types(target.dtype, wire.dtype)
            part = self.arena.take(target.numel(), wide, on_host=target.device.type == "cpu")
            self._reducer(self._channel, unit, wire, part, after, self.arena)
            target.add_(part)
            self.arena.give(part)
        else:
            self._reducer(self._channel, unit, wire, target, after, self.arena)
        if completes:
            self._complete(unit, target, carried)
        self.end(unit, target, squares=squares)
        if wire is not bucket:
            self.arena.give(wire)
        if not self.rest.is_replicated:
            self.arena.give(bucket)

    def _complete(self, unit: Unit, target: torch.Tensor, carried: torch.Tensor | None) -> None:
        """Sum over the axes along which ranks hold equal ranges, in the accumulator's own dtype."""
        if self._outer:
            self._channel[self._outer].all_reduce(target, scale=self.averaging.after)
        if carried is not None:
            target.add_(carried)

    def _complete_late(self, unit: Unit, carried: torch.Tensor | None) -> None:
        target = self.begin(unit, reads=True)
        self._complete(unit, target, carried)
        self.end(unit, target, squares=True)

    def finish(self, *, codes: bool = True) -> None:
        """Complete all sums over ranks, starting those not started; `codes` says that no more gradients will come.

        Collective over: the data axis.

        Raises:
            UsageError: on every rank, if gradients of all parameters are required and one of a rank is missing.
            StoreError: on every rank, if swapped gradients of one could not be read or written.
        """
        if not self.is_local or (self.is_early and codes):
            self._sum_rest()
        for unit, state in zip(self.table.units if self.is_local else (), self._states, strict=False):
            if not state.is_averaged:
                self._filled(unit, state)
        self._backlog.clear()
        self.drain()
        if self._requires_all:
            _require_all(self.table, () if self.is_given_up else self._states, self.mesh["data"])

    def _sum_rest(self) -> None:
        self._is_due = True
        self._launch_rest()
        for unit in reversed(self.table.units):
            state = self._states[unit.index]
            if not state.is_averaged:
                carried, state.carried, state.is_averaged = state.carried, None, True
                self._run(unit, state, functools.partial(self._complete_late, unit, carried))

    def clear(self) -> None:
        """Forget all gradients; the next one of each parameter overwrites."""
        self._backlog.clear()
        self.has_gradients = self.is_given_up = False
        self._reducer.forget()
        self.forget_squares()
        for index, state in enumerate(self._states):
            if state.bucket is not None and not self.rest.is_replicated:
                self.arena.give(state.bucket)
            self._states[index] = _UnitState()

    def pause(self) -> None:
        """Wait for the sums that were started; afterwards only its stored tensor refers to an accumulator."""
        self._backlog.clear()
        for state in self._states if self.rest.is_replicated else ():
            state.bucket = None  # it is the accumulator, and is taken from there again
            state.views.clear()

    def rescale(self, factor: float, *, is_overflow: bool) -> None:
        """Tell error feedback that the loss scale was multiplied by `factor`."""
        self._reducer.adjust(factor, is_overflow=is_overflow)


def is_summed(grads: GradStore) -> bool:
    """True if all gradients are there, and summed over ranks or about to be."""
    return grads.has_gradients and not grads.is_open and all(state.is_averaged for state in grads._states)


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


def _scaled(bucket: torch.Tensor, factor: float, dtype: torch.dtype, arena: Arena) -> torch.Tensor:
    """`bucket` times `factor` in `dtype`: in place, or in a buffer of the arena."""
    if bucket.dtype == dtype:
        return bucket.mul_(factor) if factor != 1.0 else bucket
    wire = arena.take(bucket.numel(), dtype)
    return torch.mul(bucket, factor, out=wire) if factor != 1.0 else wire.copy_(bucket)


def _require_all(table: Table, states: Sequence[_UnitState], comm: Comm) -> None:
    """Collective over: the group.

    Raises:
        UsageError: on every rank, if a parameter of one got no gradient since the last clear.
    """
    missing = _missing_sentence(table, states)
    comm.agree(not missing, missing, UsageError)


def _missing_sentence(table: Table, states: Sequence[_UnitState]) -> str:
    """Names of parameters without a gradient since the last clear, as a sentence; empty if there are none."""
    names = [
        entry.name
        for unit, state in zip(table.units, states, strict=False)  # no states: nothing is asked for
        for entry in unit.layout.entries
        if entry.name not in state.seen
    ]
    if not names:
        return ""
    return (
        f"no gradient since the last step for {format_list(names, NAMES_SHOWN)}, and "
        "zero_optimization.ignore_unused_parameters is false; "
        "use each parameter in the loss of every rank, set requires_grad to False before initialize, or set the "
        "key to true"
    )
