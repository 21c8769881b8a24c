"""Gradients at rest: accumulators as stored tensors, transfers of those in swap files, and the norm of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.base.device import is_on_device
from mpispeed.base.errors import StoreError
from mpispeed.mesh.comm import text_of
from mpispeed.native import exact_squares, exact_sum
from mpispeed.native.reduce import square_partials
from mpispeed.sharding.arrivals import Arrivals, fetch, start_fetch
from mpispeed.store.arena import Arena
from mpispeed.store.layout import BLOCK
from mpispeed.store.stored_tensor import SwappedTensor, last_bytes, widen
from mpispeed.store.tiers import GRAD, IN_MEMORY, Tiers
from mpispeed.store.transfers import own_share, own_span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.layout import Span, Table, Unit
    from mpispeed.store.stored_tensor import Carried, Lease, StoredTensor

WRITES_BEHIND = 2
"""Units whose gradients may be on their way to disk while others are summed."""


class GradShards:
    """One accumulator per unit, replicated or sharded, in memory or in a swap file.

    A swapped one is replaced by a buffer while its unit is summed. Errors of the disk are kept for `drain`: sums go on
    meanwhile, because other ranks take part in them. Gradients that come from a device to the host alone are not waited
    for before they are read, and rest in their own dtype (`Arrivals`).

    Attributes:
        is_local: gradients are this rank's own and rest whole: nothing sums them, and all of them is looked at. Set by
            the `UnitExchange` that leaves them so.
        pins: buffers in host memory are page-locked, where this process computes on a device.
    """

    def __init__(self, table: Table, mesh: Mesh, *, tiers: Tiers = IN_MEMORY, arena: Arena | None = None) -> None:
        """Start with zeros.

        Args:
            table: the units; `states.grad` is the placement of accumulators, and `states.master` that of the range
                needed here.
            mesh: the ranks.
            tiers: the sharded accumulators that are in swap files.
            arena: gives buffers; its own by default.
        """
        self.table, self.mesh = table, mesh
        self.arena = Arena(tiers.device) if arena is None else arena
        self.is_local = False
        self.pins = tiers.plan.pins_states or tiers.pins(GRAD)
        self._arrivals = Arrivals()
        self._behind = WRITES_BEHIND if tiers.plan.writes_behind else 0
        self._tensors = [
            tiers.zeros(
                GRAD,
                unit.index,
                own_span(mesh, unit.states.grad, unit.layout.padded).numel,
                unit.states.accumulate,
            )
            for unit in table.units
        ]
        # One length for all units: the arena would keep buffers for every length.
        swapped = [stored for stored in self._tensors if stored.is_swapped]
        self._longest = {d: max(c.numel for c in swapped if c.dtype == d) for d in {c.dtype for c in swapped}}
        self._buffers: dict[int, torch.Tensor] = {}  # by unit
        self._problem = ""
        self._squares: dict[int, list[float]] = {}
        self._writes: dict[int, Carried] = {}  # by unit, oldest first

    # -- while a unit is summed --------------------------------------------------------------------------------------

    def whole(self, unit: Unit) -> torch.Tensor:
        """The accumulator itself, where it is replicated in memory. Shapes: [padded]."""
        return self._tensors[unit.index].get()

    def begin(self, unit: Unit, *, reads: bool) -> torch.Tensor:
        """The destination of a sum: the range needed here, or a buffer for it; `reads` if it adds to the old values.

        Shapes: [target_span(unit).numel].
        """
        stored = self._tensors[unit.index]
        if not isinstance(stored, SwappedTensor):
            if not reads:
                self._arrivals.drop(unit.index)
            return self.reduced(unit)
        values = self._buffer(unit, stored)
        resting = self._arrivals.resting(unit.index, stored)
        if reads and isinstance(resting, SwappedTensor):
            self._await(resting.start_get(last_bytes(values, resting.dtype)))
            widen(values, resting.dtype)
        self._arrivals.drop(unit.index)
        return values

    def _buffer(self, unit: Unit, stored: SwappedTensor) -> torch.Tensor:
        """A buffer instead of a swapped accumulator. Shapes: as `stored`."""
        self._take_back(unit.index)
        buffer = self.arena.take(self._longest[stored.dtype], stored.dtype, on_host=True, pin=self.pins)
        self._buffers[unit.index] = buffer
        return buffer[: stored.numel]

    def end(self, unit: Unit, target: torch.Tensor, *, squares: bool) -> None:
        """Take back what `begin` gave; a last sum is squared while it is in memory."""
        stored = self._tensors[unit.index]
        if not isinstance(stored, SwappedTensor):
            return
        self._squares.pop(unit.index, None)
        if squares:
            self.square(unit, target)
        self._write(unit.index, stored, target)

    def _write(self, index: int, stored: SwappedTensor, values: torch.Tensor) -> None:
        self._writes[index] = stored.start_put(values)
        while len(self._writes) > self._behind:
            self._take_back(next(iter(self._writes)))

    def is_across(self, unit: Unit, values: torch.Tensor) -> bool:
        """True if `bring` takes these values: they are on a device, and the accumulator of the unit is not."""
        return not unit.states.grad.is_replicated and self._arrivals.takes(self._tensors[unit.index], values)

    def beside(self, device: torch.device) -> AbstractContextManager[None]:
        """Context in which copies to the host are queued beside the work of the device."""
        return self._arrivals.beside(device)

    def bring(self, comm: Comm, unit: Unit, values: torch.Tensor, *, squares: bool) -> None:
        """Set the accumulator of a unit to the whole sum, which `is_across`, in the dtype in which that is.

        Not blocking where host memory is page-locked, until gradients are read. A last sum is squared on its device.

        Collective over: `comm`, which is this rank alone.
        Shapes: values [target_span(unit).numel].
        """
        stored, index = self._tensors[unit.index], unit.index
        self._squares.pop(index, None)
        place = self._arrivals.begin(index, stored, values.dtype)
        if squares:
            self._arrivals.square(index, self._own(unit, values))
        if isinstance(stored, SwappedTensor) and isinstance(place, SwappedTensor):
            buffer = last_bytes(self._buffer(unit, stored), values.dtype)
            fetch(comm, buffer, values)
            self._write(index, place, buffer)
        else:
            self._arrivals.note(index, start_fetch(comm, place.get(), values))

    def copied(self, unit: Unit) -> torch.Tensor:
        """A copy of the tensor that `begin` returns. Shapes: [target_span(unit).numel]."""
        target = self.begin(unit, reads=True)
        copy = target.clone()
        self._free(unit.index)
        return copy

    def _free(self, index: int) -> None:
        if index in self._buffers:
            self.arena.give(self._buffers.pop(index))

    def _take_back(self, index: int) -> None:
        """Wait for the pending write of a unit's gradients."""
        if index in self._writes:
            self._await(self._writes.pop(index))
            self._free(index)

    def _await(self, carried: Carried) -> None:
        try:
            carried.wait()
        except Exception as error:  # whatever it is: the other ranks go on
            self._problem = self._problem or text_of(error)

    def drain(self) -> None:
        """Wait for the disk, and agree that every transfer succeeded.

        Collective over: the data axis, where accumulators are swapped.

        Raises:
            StoreError: on every rank, if swapped gradients of one could not be read or written.
        """
        for index in list(self._writes):
            self._take_back(index)
        if any(stored.is_swapped for stored in self._tensors):
            self._square_swapped()
            self.mesh["data"].agree(not self._problem, self._problem, StoreError)

    def _square_swapped(self) -> None:
        """Square swapped gradients without a square, so that `square_limbs` reads nothing that can fail."""
        for unit, stored in zip(self.table.units, self._tensors, strict=True):
            is_known = unit.index in self._squares or self._arrivals.has_squares(unit.index)
            if stored.is_swapped and not is_known and not self._problem:
                try:
                    values = self._arrivals.resting(unit.index, stored).get()
                    self._squares[unit.index] = self._square(unit, values, threads=1)
                except Exception as error:
                    self._problem = text_of(error)

    def square(self, unit: Unit, values: torch.Tensor) -> None:
        """Keep the squares of a unit whose gradients are replaced next. Shapes: values [target_span(unit).numel]."""
        self._squares[unit.index] = self._square(unit, values, threads=1)

    # -- after the sums ----------------------------------------------------------------------------------------------

    def target_span(self, unit: Unit) -> Span:
        """The range of the flat buffer whose gradients this rank needs: its part of the sums, or all of its own."""
        return unit.layout.whole if self.is_local else own_span(self.mesh, unit.states.master, unit.layout.padded)

    def reduced(self, unit: Unit) -> torch.Tensor:
        """Gradients of this rank's target range: themselves if they are in memory, else a copy.

        Shapes: [target_span(unit).numel].
        """
        accumulator = self._arrivals.wide(unit.index, self._tensors[unit.index])
        return accumulator[self.target_span(unit).slice] if unit.states.grad.is_replicated else accumulator

    def put_reduced(self, unit: Unit, values: torch.Tensor) -> None:
        """Set gradients; copies nothing if `values` are what `reduced` returned from memory."""
        if not unit.states.grad.is_replicated:
            self._arrivals.drop(unit.index)
            self._tensors[unit.index].put(values)
        elif values.data_ptr() != self.reduced(unit).data_ptr():
            self.reduced(unit).copy_(values)
        self._squares.pop(unit.index, None)

    def stored(self, unit: Unit) -> tuple[StoredTensor, int]:
        """The stored tensor of the gradients, and the offset of the range that this rank updates.

        It may be of a narrower dtype than the accumulator. Waits for those of this unit that come from a device.
        """
        own = own_span(self.mesh, unit.states.master, unit.layout.padded)
        stored = self._arrivals.resting(unit.index, self._tensors[unit.index])
        return stored, own.start if unit.states.grad.is_replicated else 0

    def lend(self, unit: Unit, start: int, stop: int, home: torch.device) -> Lease:
        """Lease elements of the range that this rank updates.

        Where `home` is the host, and they rest on a device, they start to travel at once. Not blocking, except as
        `stored`.
        """
        stored, at = self.stored(unit)
        return self._arrivals.lend(unit.index, stored, at + start, at + stop, home)

    def note_rounded(self, unit: Unit, dtype: torch.dtype) -> None:
        """Gradients of a unit are values of `dtype`, whatever they rest in, until they are given to somebody."""
        self._arrivals.note_rounded(unit.index, dtype)

    def square_limbs(self, units: Iterable[Unit], *, threads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The exact sum of squares of the gradients for which this rank alone counts: on the host, and on the device.

        Nothing waits for the device; None: there are no gradients.

        Shapes: [exact_sum.LIMBS] each.
        """
        near: list[float] = []
        far: list[torch.Tensor] = []
        for unit in units:
            known = self._squares.get(unit.index)
            if known is None:
                known = self._arrivals.squares(unit.index)
            if known is not None:
                near += known
            elif is_on_device(values := self._resting(unit)):
                far.append(self._own(unit, values))
            else:
                near += self._square(unit, values, threads=threads)
        limbs = None
        if far:
            limbs = torch.zeros(exact_sum.LIMBS, dtype=torch.int64, device=far[0].device)
            exact_squares.add_squares(limbs, far, block=BLOCK)
            exact_sum.carry(limbs)
        return exact_sum.limbs_of(near), limbs

    def _resting(self, unit: Unit) -> torch.Tensor:
        """As `reduced`, in the dtype in which they rest."""
        stored = self._arrivals.resting(unit.index, self._tensors[unit.index])
        return stored.get()[self.target_span(unit).slice] if unit.states.grad.is_replicated else stored.get()

    def _square(self, unit: Unit, values: torch.Tensor, *, threads: int) -> list[float]:
        return square_partials(self._own(unit, values), block=BLOCK, threads=threads)

    def _own(self, unit: Unit, values: torch.Tensor) -> torch.Tensor:
        states, share = unit.states, unit.layout.whole
        if not self.is_local:
            share = own_share(self.mesh, states.master, unit.layout.padded, states.partial)
        return values[share.shifted(-self.target_span(unit).start).slice]

    def forget_squares(self) -> None:
        """Drop the squares, because gradients begin anew."""
        self._squares.clear()
        self._arrivals.forget()

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulators in this rank's memory; buckets in flight are counted by the arena."""
        return sum(stored.memory_bytes for stored in self._tensors)

    @property
    def swapped_bytes(self) -> int:
        """Bytes of the accumulators in this rank's swap files."""
        return sum(stored.file_bytes for stored in self._tensors)


MOST_NOTES = 4
"""Counts that travel with the sum of squares."""


def global_square_sum(
    mesh: Mesh,
    grads: GradShards,
    *,
    threads: int,
    counts: Callable[[Unit], bool] = lambda _: True,
    notes: Sequence[int] = (),
) -> tuple[float, list[int]]:
    """Sum of squares of all averaged gradients, correctly rounded; inf or NaN if any gradient is.

    Each rank sums fixed blocks of its own shard in fp64; the block sums are added as long integers, so neither sharding
    over the data axis nor the number of its ranks changes a bit, and the message has one length. Data ranks with copies
    of a unit divide it among them. `counts` is true for units that this rank counts: parameters that several ranks of
    another axis hold alike are counted by one of them.

    Returns the sum of squares and the sums of `notes` (at most MOST_NOTES) over the ranks. Waits for the device.

    Collective over: all ranks.
    """
    near, far = grads.square_limbs(filter(counts, grads.table.units), threads=threads)
    return sum_squares(mesh, near, far, notes)


def sum_squares(
    mesh: Mesh, near: torch.Tensor, far: torch.Tensor | None, notes: Sequence[int]
) -> tuple[float, list[int]]:
    """`global_square_sum` of what `GradShards.square_limbs` gave. Waits for the device.

    Collective over: all ranks.
    """
    sums = sum_limbs(mesh, near if far is None else near + far.cpu(), notes)
    counted: list[int] = sums[exact_sum.LIMBS :].tolist() if notes else []
    return exact_sum.value_of(sums), counted[: len(notes)]


def sum_apart(mesh: Mesh, far: torch.Tensor, notes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """The limbs of a device, summed over the ranks where they are, and the sums of notes, by a message of the hosts.

    Nothing waits for the device where groups keep the lead of the host (`Comm.keeps_lead`).

    Collective over: all ranks.
    """
    comm = mesh[mesh.topology.names]
    if comm.size == 1:
        return far, [int(note) for note in notes]
    counted = torch.tensor(notes, dtype=torch.int64)
    comm.all_reduce(counted)
    comm.all_reduce(far)
    return far, counted.tolist()


def sum_limbs(mesh: Mesh, limbs: torch.Tensor, notes: Sequence[int] = ()) -> torch.Tensor:
    """Limbs and notes, summed over the ranks.

    Shapes: limbs [exact_sum.LIMBS], on the host; the result [exact_sum.LIMBS + MOST_NOTES].

    Collective over: all ranks.
    """
    noted = torch.tensor([*notes, *(0,) * (MOST_NOTES - len(notes))], dtype=torch.int64)
    message = torch.cat((limbs, noted))
    mesh[mesh.topology.names].all_reduce(message)
    return message


def gather_numbers(mesh: Mesh, numbers: Sequence[float]) -> torch.Tensor:
    """As many numbers of every rank, on the host. Shapes: [ranks, numbers].

    Collective over: all ranks.
    """
    comm = mesh[mesh.topology.names]
    everyone = torch.empty(comm.size * len(numbers), dtype=torch.float64)
    comm.all_gather(everyone, torch.tensor(numbers, dtype=torch.float64))
    return everyone.view(comm.size, len(numbers))
