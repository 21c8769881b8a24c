"""Gradients: from autograd into flat buckets, summed over ranks in plan order, accumulated where they rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import UsageError
from mpispeed.store.arena import Arena
from mpispeed.store.move import own_span, reduce_into

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.work import Work
    from mpispeed.store.layout import Entry, Span
    from mpispeed.store.placement import Placement
    from mpispeed.store.table import Table, Unit

PARTIAL_AXES = ("data",)
"""Each data-parallel rank sees its own samples, so raw gradients are partial sums over this axis."""


@dataclass(slots=True)
class _UnitState:
    """What happened to a unit in the current micro-step and since the last clear."""

    bucket: torch.Tensor | None = None  # where gradients land in this micro-step
    landed: set[str] = field(default_factory=set)  # entries that arrived in this micro-step
    written: set[str] = field(default_factory=set)  # entries that hold a value since the last clear
    is_launched: bool = False  # all that landed is in the sum over ranks
    holds_sum: bool = False  # the accumulator at rest holds reduced gradients
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


class GradStore:
    """Gradients of all units under one resting placement.

    At a whole placement a micro-step adds into whole accumulators and the sum over ranks is taken once, when
    `end_backward(reduce=True)`. At a cut placement every micro-step is summed over ranks and the own part added to
    the accumulator. `target` is where the sum is needed: it may be cut while the gradients rest whole.
    What was not summed before `finish` is summed there.
    """

    def __init__(
        self,
        table: Table,
        mesh: Mesh,
        *,
        rest: Placement,
        target: Placement,
        accumulate: torch.dtype,
        communicate: torch.dtype | None,  # None: in the dtype that each unit came in
        averaging: Averaging,
        is_overlapped: bool,
    ) -> None:
        self.table, self.mesh, self.rest, self.target = table, mesh, rest, target
        self.averaging = averaging
        self.is_overlapped = is_overlapped and mesh["data"].size > 1
        self.arena = Arena()
        self._accumulate, self._communicate = accumulate, communicate
        self._lane = mesh.lane("grads") if self.is_overlapped else mesh
        self._accumulators = [self._zeros(unit) for unit in table.units]
        self._states = [_UnitState() for _ in table.units]
        self._next = len(table.units) - 1
        self._is_open = False
        self.reduces_now = True

    def _zeros(self, unit: Unit) -> torch.Tensor:
        return torch.zeros(own_span(self.mesh, self.rest, unit.layout.padded).numel, dtype=self.dtype(unit))

    def dtype(self, unit: Unit) -> torch.dtype:
        """In which gradients of the unit are accumulated."""
        return torch.float64 if unit.dtype == torch.float64 else self._accumulate

    def wire_dtype(self, unit: Unit) -> torch.dtype:
        """In which gradients of the unit travel."""
        is_own = self._communicate is None or unit.dtype == torch.float64
        return unit.dtype if is_own else self._communicate  # type: ignore[return-value]

    # -- one micro-step ------------------------------------------------------------------------------------

    def begin_backward(self, *, reduces: bool) -> None:
        """Prepare for one backward pass; `reduces` says whether sums over ranks are due in it."""
        self.reduces_now = reduces or not self.rest.is_whole
        self._is_open = True
        self._next = len(self.table.units) - 1
        for unit, state in zip(self.table.units, self._states, strict=True):
            state.landed.clear()
            if state.is_launched and self.rest.is_whole:
                self._carry(unit, state)
            state.is_launched = False

    def _carry(self, unit: Unit, state: _UnitState) -> None:
        """Put a sum over ranks aside: raw gradients that were added to it would count the ranks twice."""
        if state.work is not None:
            state.work.wait()
            state.work = None
        state.carried = self.reduced(unit).clone()
        state.written.clear()

    def land(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """Take one gradient from autograd; starts the unit's reduction when it was the last one missing.

        Raises:
            UsageError: no backward pass was begun, or the unit's gradients are already on their way in this one.
        """
        state = self._states[unit.index]
        if not self._is_open:
            msg = (
                f"a gradient of parameter {entry.name!r} arrived outside of engine.backward(); call "
                "engine.backward(loss), not loss.backward(), and destroy() an engine before another one takes its model"
            )
            raise UsageError(msg)
        if state.is_launched:
            msg = (
                f"a second gradient of parameter {entry.name!r} arrived after its unit {unit.name!r} was reduced in "
                "the same backward pass; checkpointed segments that share parameters need use_reentrant=False"
            )
            raise UsageError(msg)
        bucket = self._bucket(unit, state)
        view = bucket[entry.span.slice].view(entry.shape)
        if entry.name in state.written:
            view.add_(grad)
        else:
            view.copy_(grad)
            state.written.add(entry.name)
        state.landed.add(entry.name)
        if self.reduces_now:
            self._launch_ready()

    def _bucket(self, unit: Unit, state: _UnitState) -> torch.Tensor:
        if state.bucket is None:
            if self.rest.is_whole:
                state.bucket = self._accumulators[unit.index]
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
        self._is_open = False
        if self.reduces_now:
            self._launch_rest()

    def _launch_rest(self) -> None:
        for unit in reversed(self.table.units):
            state = self._states[unit.index]
            if state.is_launched:
                continue
            bucket = self._bucket(unit, state)
            for entry in unit.layout.entries:
                if entry.name not in state.written:
                    bucket[entry.span.slice].zero_()
            self._launch(unit, state, bucket)

    # -- sums over ranks -------------------------------------------------------------------------------------

    def _launch_ready(self) -> None:
        """Start reductions in plan order: last unit first; readiness gates, it never reorders."""
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
        adds, carried = state.holds_sum and not self.rest.is_whole, state.carried
        state.holds_sum, state.carried = True, None
        if self.is_overlapped:
            if state.work is not None:
                state.work.wait()  # of the previous micro-step: done by now, but its failure must surface
            state.work = self._lane["data"].start(lambda _: self._reduce(unit, bucket, carried, adds=adds))
        else:
            self._reduce(unit, bucket, carried, adds=adds)

    def _reduce(self, unit: Unit, bucket: torch.Tensor, carried: torch.Tensor | None, *, adds: bool) -> None:
        """Runs on the lane's progress thread when overlapped; touches only this unit's buffers."""
        accumulator = self._accumulators[unit.index]
        before, after = self.averaging.before, self.averaging.after
        wire = bucket
        if bucket.dtype != self.wire_dtype(unit):
            wire = self.arena.take(bucket.numel(), self.wire_dtype(unit))
            torch.mul(bucket, before, out=wire) if before != 1.0 else wire.copy_(bucket)
        elif before != 1.0:
            wire.mul_(before)
        target = self.reduced(unit)
        is_received = self.target.is_whole or _receives(target.dtype, wire.dtype)
        if adds or not is_received:
            part = self.arena.take(target.numel(), target.dtype if is_received else wire.dtype)
            reduce_into(self._lane, wire, part, PARTIAL_AXES, self.target, scale=after)
            target.add_(part) if adds else target.copy_(part)
            self.arena.give(part)
        else:
            reduce_into(self._lane, wire, target, PARTIAL_AXES, self.target, scale=after)
        if carried is not None:
            target.add_(carried)
        if wire is not bucket:
            self.arena.give(wire)
        if bucket is not accumulator:
            self.arena.give(bucket)

    def target_span(self, unit: Unit) -> Span:
        """The range of the flat buffer whose summed gradients this rank needs."""
        return own_span(self.mesh, self.target, unit.layout.padded)

    def finish(self) -> None:
        """Complete all sums over ranks: start those that no backward pass was asked to start, wait for all.

        Collective over: the data axis.
        """
        self._launch_rest()
        self._wait()

    def _wait(self) -> None:
        for state in self._states:
            if state.work is not None:
                state.work.wait()
                state.work = None

    # -- after the sums ----------------------------------------------------------------------------------------

    def reduced(self, unit: Unit) -> torch.Tensor:
        """Averaged gradients of this rank's target range. Shapes: [target_span(unit).numel]."""
        accumulator = self._accumulators[unit.index]
        return accumulator[self.target_span(unit).slice] if self.rest.is_whole else accumulator

    def clear(self) -> None:
        """Forget all gradients; the next one of each parameter overwrites."""
        self._wait()
        for state in self._states:
            if state.bucket is not None and not self.rest.is_whole:
                self.arena.give(state.bucket)
            state.bucket = None
            state.written.clear()
            state.landed.clear()
            state.holds_sum = False
            state.is_launched = False
            state.carried = None

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulators on this rank; buckets in flight are counted by the arena."""
        return sum(accumulator.nbytes for accumulator in self._accumulators)


def _receives(shard: torch.dtype, wire: torch.dtype) -> bool:
    """True if a reduce-scatter of `wire` can deliver into `shard` directly."""
    return shard == wire or (shard == torch.float32 and wire in (torch.bfloat16, torch.float16))
