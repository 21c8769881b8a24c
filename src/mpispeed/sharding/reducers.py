"""Sums of units' gradients over ranks: the progress of each, the queue of started ones, and what carries them out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from mpispeed.base.errors import StoreError
from mpispeed.sharding.arrivals import fetch
from mpispeed.store.transfers import reduce_into

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Wait, Work
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Entry, Unit

log = logging.getLogger(__name__)

# -- progress ----------------------------------------------------------------------------------------------------


class Phase(Enum):
    """Progress of a unit's gradient in a micro-step."""

    EMPTY = "empty"
    """Nothing has landed since the last clear."""
    FILLING = "filling"
    """Gradients may land in the bucket."""
    REDUCING = "reducing"
    """All that landed is in a sum that has started."""
    REDUCED = "reduced"
    """That sum has ended."""


class Held(Enum):
    """Part of the started sums over ranks that an accumulator has."""

    NOTHING = "nothing"
    PART = "part"
    """Sums over the axes of sharding, to be summed over the others."""
    ALL = "all"
    """Averages over all ranks."""


@dataclass(slots=True, eq=False)
class Reduction:
    """One sum over ranks of one unit.

    Attributes:
        bucket: what is summed, full; None if only sums in the accumulator are completed.
        adds: the result is added to what the accumulator has.
        completes: the accumulator has the average over all ranks afterwards.
        carried: an average that was put aside, to be added at the end.
        work: the started sum; None if it has ended.
    """

    gradient: UnitGradient
    bucket: torch.Tensor | None
    adds: bool
    completes: bool
    carried: torch.Tensor | None
    work: Work | None = None

    def settle(self, wait: Callable[[Work], object]) -> None:
        """Wait for it, once; sums of later micro-steps are not waited for."""
        if self.work is not None:
            wait(self.work)
        self.work = self.bucket = self.carried = None
        self.gradient.reduction_ended(self)


class UnitGradient:
    """The gradient of one unit, from the buckets of micro-steps to the average over ranks.

        EMPTY --land--> FILLING --launch--> REDUCING --settle--> REDUCED
                           ^                   |                    |
                           +------------ begin_micro_step ----------+

    A micro-step may fill the next bucket while the sum of the last one runs; the next launch needs it settled. A unit
    without gradients is launched from EMPTY, as zeros. Without a launch a micro-step adds to the one before.

    Attributes:
        bucket: where gradients land; the accumulator itself where that is replicated.
        landed: names of entries that arrived in this micro-step.
        written: names of entries of which the bucket has a value.
        seen: names of entries that got a gradient since the last clear.
        held: the sums that the accumulator has.
    """

    __slots__ = ("_carried", "_name", "_reduction", "_views", "bucket", "held", "landed", "phase", "seen", "written")

    def __init__(self, name: str) -> None:
        """Args: `name` is that of the unit, for messages."""
        self._name = name
        self.phase, self.held = Phase.EMPTY, Held.NOTHING
        self.bucket: torch.Tensor | None = None
        self.landed: set[str] = set()
        self.written: set[str] = set()
        self.seen: set[str] = set()
        self._views: dict[str, torch.Tensor] = {}
        self._carried: torch.Tensor | None = None
        self._reduction: Reduction | None = None

    @property
    def is_launched(self) -> bool:
        """True if all that landed in this micro-step is in a sum."""
        return self.phase in (Phase.REDUCING, Phase.REDUCED)

    @property
    def is_averaged(self) -> bool:
        """True if the accumulator has averages over all ranks, or a sum that was started will leave them there."""
        return self.held is Held.ALL

    @property
    def reduction(self) -> Reduction | None:
        """The sum that was started and not waited for."""
        return self._reduction

    def begin_micro_step(self) -> None:
        """Take gradients again; a sum may still run."""
        self.landed.clear()
        if self.is_launched:
            self.phase = Phase.FILLING

    def put_aside(self, average: torch.Tensor) -> None:
        """Take a copy of what the accumulator has, because what is added to it next is summed over ranks again."""
        self._require(self.is_averaged and self._reduction is None, "put its average aside")
        self._carried = average
        self.written.clear()
        self.held = Held.NOTHING

    def use(self, bucket: torch.Tensor, *, is_new: bool) -> None:
        """Let gradients land in `bucket`, which has no values if it is new."""
        self._require(self.bucket is None and not self.is_launched, "take a bucket")
        self.bucket = bucket
        if is_new:
            self.written.clear()

    def view(self, entry: Entry) -> torch.Tensor:
        """The bucket's part of an entry, in its shape."""
        view = self._views.get(entry.name)
        if view is None:
            if self.bucket is None:
                self._refuse("show a bucket")
            view = self._views[entry.name] = self.bucket[entry.span.slice].view(entry.shape)
        return view

    def let_go(self) -> torch.Tensor | None:
        """Give the bucket away; what was written stays known."""
        bucket, self.bucket = self.bucket, None
        self._views.clear()
        return bucket

    def land(self, name: str) -> None:
        """Note that the bucket has taken a gradient of the entry `name`."""
        self._require(not self.is_launched, f"take the gradient of {name!r}")
        for names in (self.written, self.landed, self.seen):
            names.add(name)
        self.phase = Phase.FILLING

    def launch(self, *, keeps: bool, completes: bool) -> Reduction:
        """The sum of all that has landed; its bucket is no longer the unit's.

        Args:
            keeps: the accumulator is another tensor than the bucket, and its sums stay.
            completes: the sum is over all ranks, or completes that over all.
        """
        self._require(not self.is_launched and self._reduction is None, "be summed")
        return self._reduce(self.let_go(), adds=keeps and self.held is not Held.NOTHING, completes=completes)

    def complete(self) -> Reduction:
        """The sum over the remaining axes of what the accumulator has."""
        self._require(self.is_launched and self.held is Held.PART and self._reduction is None, "be completed")
        return self._reduce(None, adds=False, completes=True)

    def _reduce(self, bucket: torch.Tensor | None, *, adds: bool, completes: bool) -> Reduction:
        carried = self._carried if completes else None
        if completes:
            self._carried = None
        self.held = Held.ALL if completes else Held.PART
        self.phase = Phase.REDUCING
        self._reduction = Reduction(self, bucket, adds, completes, carried)
        return self._reduction

    def reduction_ended(self, reduction: Reduction) -> None:
        """Note the end of a sum; an older one than the last changes nothing."""
        if reduction is self._reduction:
            self._reduction = None
            if self.phase is Phase.REDUCING:
                self.phase = Phase.REDUCED

    def _require(self, is_allowed: bool, what: str) -> None:
        if not is_allowed:
            self._refuse(what)

    def _refuse(self, what: str) -> NoReturn:
        running = " while its last sum runs" if self._reduction is not None else ""
        msg = (
            f"internal error: the gradient of unit {self._name!r} cannot {what}: it is {self.phase.value}, its "
            f"accumulator has {self.held.value} of the sums over ranks{running}"
        )
        raise StoreError(msg)


LEAST_ELEMENTS = 1 << 22
"""So much may be under way in any case: small units should not wait for each other."""


def limit_of(sizes: Iterable[int]) -> int:
    """Elements that may be in flight for units of these sizes: two of the largest."""
    return max(2 * max(sizes, default=0), LEAST_ELEMENTS)


class Backlog:
    """Started and unfinished sums, oldest first; bounded, because their buckets take memory."""

    def __init__(self, limit_elements: int) -> None:
        self._limit, self._total = limit_elements, 0
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()

    def add(self, elements: int, settle: Callable[[], object]) -> None:
        """Call `settle` of the oldest until `elements` fit under the limit, then append."""
        while self._queue and self._total + elements > self._limit:
            self._pop()
        self._queue.append((elements, settle))
        self._total += elements

    def clear(self) -> None:
        """Settle everything."""
        while self._queue:
            self._pop()

    def _pop(self) -> None:
        elements, settle = self._queue.popleft()
        self._total -= elements
        settle()


# -- how sums are carried out ------------------------------------------------------------------------------------


class Listener:
    """Observer of gradients before and after sums; by default ignores everything."""

    def note(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """Note a gradient that the next sum of the unit will contain."""

    def forget(self) -> None:
        """Forget noted gradients, which are not going to be summed."""

    def adjust(self, factor: float, *, is_overflow: bool) -> None:
        """Follow the loss scale, multiplied by `factor`; after an overflow if so."""


class Reducer(Protocol):
    """Sums gradients over ranks. `__call__` may run on a channel's progress thread; the rest runs on the caller's."""

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """Leave `scale` times this rank's part of the sum of `wire` in `target`; `wire` is scratch.

        Collective over: the axes that the reducer was made for.
        Shapes: wire [padded], target [this rank's range]; `target` may be a slice of `wire` or of another dtype.
        """

    def note(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """As in `Listener`."""

    def forget(self) -> None:
        """As in `Listener`."""

    def adjust(self, factor: float, *, is_overflow: bool) -> None:
        """As in `Listener`."""


class PlainReducer(Listener):
    """Sums over the axes that the states of a unit say, by `store.transfers.reduce_into`."""

    def __init__(self, *, scatters: bool = True) -> None:
        """Args: without `scatters` buffers are all-reduced and each rank takes its range."""
        self._scatters = scatters

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """As in `Reducer`."""
        states, scatters = unit.states, self._scatters
        reduce_into(mesh, wire, target, states.each_sum, states.master, scale=scale, scatters=scatters, arena=arena)


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


@dataclass(frozen=True, slots=True)
class SumChannel:
    """Time and place of sums: beside the backward pass, in turn, or at once.

    Attributes:
        mesh: carries them.
        wait: waits for started ones; its second argument is the reason, for messages.
        is_started: they are started and waited for.
        is_overlapped: they run beside the backward pass; else each is waited for at once.
    """

    mesh: Mesh
    wait: Wait
    is_started: bool
    is_overlapped: bool

    @classmethod
    def of(cls, mesh: Mesh, *, is_overlapped: bool, wait: Wait | None = None, is_copied: bool = False) -> SumChannel:
        """The channel of gradients of `mesh`.

        Args:
            mesh: the ranks.
            is_overlapped: sums run beside the backward pass, if there is anything to do: a single rank has no peers.
            wait: waits for started sums; if given, sums that are not overlapped are started too, so that it sees them.
            is_copied: gradients are copied to other memory in any case.

        Collective over: all ranks of `mesh`, where sums are started.
        """
        has_peers = mesh["data"].size > 1
        is_overlapped = is_overlapped and (has_peers or is_copied)
        is_started = is_overlapped or (wait is not None and has_peers)
        channel = mesh.channel("grads") if is_started else mesh
        return cls(channel, wait or (lambda work, _: work.wait()), is_started, is_overlapped)


class SumGradients:
    """Sums buckets over ranks with copies of a unit into accumulators, in one hop or two; the plain `UnitExchange`.

    Two hops where gradients are sharded over a part of these axes: each bucket is summed over `each_sum` of the unit's
    states, and the accumulator over `last_sum` once (MiCS, arXiv 2205.00119, two-hop synchronization).
    """

    local_grads = False
    takes_units = True
    keeps_buckets = False

    def __init__(
        self, shards: GradShards, channel: Mesh, averaging: Averaging, *, reducer: Reducer | None = None
    ) -> None:
        """Prepare sums.

        Args:
            shards: the accumulators.
            channel: the ranks.
            averaging: factors around the sum.
            reducer: sums a bucket over the axes of `each_sum`; plain sums by default.
        """
        self.reducer = reducer or PlainReducer()
        self._shards, self._channel, self.averaging = shards, channel, averaging

    @property
    def sums(self) -> SumGradients:
        """This object."""
        return self

    def begin_backward(self, *, is_again: bool) -> None:
        """As in `UnitExchange`; nothing depends on it."""

    def has_taken(self, unit: Unit) -> bool:
        """False: sums can be set until the update."""
        return False

    def clear(self) -> None:
        """As in `UnitExchange`."""
        self.reducer.forget()

    def rescale(self, factor: float, *, is_overflow: bool) -> None:
        """As in `UnitExchange`."""
        self.reducer.adjust(factor, is_overflow=is_overflow)

    def take(self, unit: Unit, reduction: Reduction, *, squares: bool) -> None:
        """Carry out a sum; `squares`: the gradients of the unit are not added to any more.

        On the channel's progress thread when overlapped, so it touches only this unit's buffers.

        Collective over: the data axis, or the part of it that the sum is over.
        """
        bucket, shards, arena = reduction.bucket, self._shards, self._shards.arena
        if bucket is None:
            target = shards.begin(unit, reads=True)
            self._complete(unit, target, reduction.carried)
            shards.end(unit, target, squares=True)
            return
        before, after = self.averaging.before, 1.0 if unit.states.last_sum else self.averaging.after
        is_own, wire_dtype = self._is_own(unit, reduction, after), unit.states.wire
        if is_own and bucket.dtype == wire_dtype and shards.is_across(unit, bucket):
            with shards.beside(bucket.device):
                wire = _scaled(bucket, before, wire_dtype, arena)
                self._bring(unit, wire, adds=reduction.adds, squares=squares)
                arena.give(bucket)
            return
        wire = _scaled(bucket, before, wire_dtype, arena)
        self._sum(unit, reduction, wire, after, squares=squares)
        if is_own and not reduction.adds:
            shards.note_rounded(unit, wire.dtype)
        if wire is not bucket:
            arena.give(wire)
        if not unit.states.grad.is_replicated:
            arena.give(bucket)

    def _is_own(self, unit: Unit, reduction: Reduction, after: float) -> bool:
        """True if the sum is what this rank has, unchanged."""
        is_plain = type(self.reducer) is PlainReducer and after == 1.0
        has_more = bool(unit.states.last_sum) or reduction.carried is not None
        return is_plain and not has_more and self._channel[unit.states.each_sum].size == 1

    def _bring(self, unit: Unit, wire: torch.Tensor, *, adds: bool, squares: bool) -> None:
        """Take own gradients of a device over into host memory; what crosses is in their own dtype."""
        shards, comm = self._shards, self._channel[unit.states.each_sum]
        if not adds:
            shards.bring(comm, unit, wire, squares=squares)
            return
        target = shards.begin(unit, reads=True)
        part = shards.arena.take(wire.numel(), wire.dtype, on_host=True, pin=shards.pins)
        fetch(comm, part, wire)
        target.add_(part)
        shards.arena.give(part)
        shards.end(unit, target, squares=squares)

    def _sum(self, unit: Unit, reduction: Reduction, wire: torch.Tensor, after: float, *, squares: bool) -> None:
        shards, arena = self._shards, self._shards.arena
        target = shards.begin(unit, reads=reduction.adds)
        if reduction.adds:
            wide = torch.promote_types(target.dtype, wire.dtype)
            part = arena.take(target.numel(), wide, on_host=target.device.type == "cpu")
            self.reducer(self._channel, unit, wire, part, after, arena)
            target.add_(part)
            arena.give(part)
        else:
            self.reducer(self._channel, unit, wire, target, after, arena)
        if reduction.completes:
            self._complete(unit, target, reduction.carried)
        shards.end(unit, target, squares=squares)

    def _complete(self, unit: Unit, target: torch.Tensor, carried: torch.Tensor | None) -> None:
        """Sum over the axes along which ranks hold equal ranges, in the accumulator's own dtype."""
        if unit.states.last_sum:
            self._channel[unit.states.last_sum].all_reduce(target, scale=self.averaging.after)
        if carried is not None:
            target.add_(carried)


def _scaled(bucket: torch.Tensor, factor: float, dtype: torch.dtype, arena: Arena) -> torch.Tensor:
    """`bucket` times `factor` in `dtype`: in place, or in a buffer of the arena."""
    if bucket.dtype == dtype:
        return bucket.mul_(factor) if factor != 1.0 else bucket
    wire = arena.take(bucket.numel(), dtype)
    return torch.mul(bucket, factor, out=wire) if factor != 1.0 else wire.copy_(bucket)
