"""Accumulators of gradients as stored tensors, and transfers of those in swap files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from mpispeed.base.device import is_on_device
from mpispeed.base.errors import StoreError, UsageError
from mpispeed.mesh.comm import text_of
from mpispeed.native import exact_squares
from mpispeed.native.reduce import square_partials
from mpispeed.store.layout import BLOCK
from mpispeed.store.stored_tensor import SwappedTensor
from mpispeed.store.tiers import GRAD, Tiers
from mpispeed.store.transfers import own_share, own_span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Span
    from mpispeed.store.placement import Placement
    from mpispeed.store.stored_tensor import Carried, StoredTensor
    from mpispeed.store.table import Table, Unit

WRITES_BEHIND = 2
"""Units whose gradients may be on their way to disk while others are summed."""


_CODED_ALREADY = (
    "a backward pass after the gradients of this step were coded: with overlap_comm a 1-bit optimizer takes one "
    "backward pass at an accumulation boundary; add the losses, or set zero_optimization.overlap_comm to false"
)


class Early(Protocol):
    """Compresses local gradients unit by unit during backward; `onebit_early.EarlyOneBit` is one."""

    def __call__(self, unit: Unit, grad: torch.Tensor) -> None:
        """Agree on a unit."""

    def is_ready(self) -> bool:
        """True if units can be compressed early now."""

    def takes(self, unit: Unit) -> bool:
        """False for a unit that is compressed later."""

    def has(self, unit: Unit) -> bool:
        """True if the unit was compressed for the coming update."""

    def end(self, *, is_applied: bool) -> None:
        """Tell that the update has taken the compressed units, or never will."""


class GradBuffers:
    """One accumulator per unit, replicated or sharded, in memory or in a swap file.

    A swapped one is replaced by a buffer while its unit is summed. Errors of the disk are kept for `drain`: sums go on
    meanwhile, because other ranks take part in them.
    """

    arena: Arena
    _communicate: torch.dtype | None = None  # dtype of messages; None: in the dtype that each unit came in
    early: Early | None = None
    _has_several = False  # several backward passes were made over gradients that had been summed
    is_early = False  # local gradients are coded as they come, by `early`
    is_local = False  # gradients are this rank's own and rest whole: nothing sums them, and all of them is looked at

    def __init__(
        self, table: Table, mesh: Mesh, rest: Placement, target: Placement, dtype: Callable[[Unit], torch.dtype],
        tiers: Tiers,
    ) -> None:  # fmt: skip
        """Zeros. Args: `rest` is the placement of accumulators, `target` that of the range needed here."""
        self.table, self.mesh, self.rest, self.target = table, mesh, rest, target
        self._behind = WRITES_BEHIND if tiers.plan.writes_behind else 0
        self._tensors = [
            tiers.zeros(GRAD, unit.index, own_span(mesh, rest, unit.layout.padded).numel, dtype(unit))
            for unit in table.units
        ]
        # One length for all units: the arena would keep buffers for every length.
        swapped = [stored for stored in self._tensors if stored.is_swapped]
        self._longest = {d: max(c.numel for c in swapped if c.dtype == d) for d in {c.dtype for c in swapped}}
        self._buffers: dict[int, torch.Tensor] = {}  # by unit
        self._problem = ""
        self._squares: dict[int, list[float]] = {}
        self._writes: dict[int, Carried] = {}  # by unit, oldest first

    def expect(self, *, is_local: bool, early: Early | None) -> None:
        """Prepare for one update; gradients stay this rank's own if `is_local`, and `early` may compress them."""
        self.is_local, self.early, self.is_early = is_local, early, False

    def wire_dtype(self, unit: Unit) -> torch.dtype:
        """The dtype in which gradients of the unit are sent."""
        return unit.dtype if self._communicate is None or unit.dtype == torch.float64 else self._communicate

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
            return self.reduced(unit)
        self._take_back(unit.index)
        buffer = self._buffers[unit.index] = self.arena.take(self._longest[stored.dtype], stored.dtype, on_host=True)
        values = buffer[: stored.numel]
        if reads:
            self._await(stored.start_get(values))
        return values

    def end(self, unit: Unit, target: torch.Tensor, *, squares: bool) -> None:
        """Take back what `begin` gave; a last sum is squared while it is in memory."""
        stored = self._tensors[unit.index]
        if not isinstance(stored, SwappedTensor):
            return
        self._squares.pop(unit.index, None)
        if squares:
            self._squares[unit.index] = self._square(unit, target, threads=1)
        self._writes[unit.index] = stored.start_put(target)
        while len(self._writes) > self._behind:
            self._take_back(next(iter(self._writes)))

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
        """Square swapped gradients without a square, so that `square_sums` reads nothing that can fail."""
        for unit, stored in zip(self.table.units, self._tensors, strict=True):
            if stored.is_swapped and unit.index not in self._squares and not self._problem:
                try:
                    self._squares[unit.index] = self._square(unit, stored.get(), threads=1)
                except Exception as error:
                    self._problem = text_of(error)

    def _choose_early(self, *, is_again: bool) -> None:
        """Decide if this backward pass compresses units as they come.

        Not in a second pass over the same gradients, nor ever after a script has made such a pass.

        Raises:
            UsageError: units were compressed already, and no earlier pass has shown that there are several.
        """
        if is_again and self.is_early:
            raise UsageError(_CODED_ALREADY)
        self._has_several = self._has_several or is_again
        self.is_early = self.early is not None and self.is_local and not self._has_several and self.early.is_ready()

    def _code(self, unit: Unit, values: torch.Tensor) -> None:
        """Compress local gradients now, unless they are summed over other axes first; their squares are kept."""
        if self.early is not None and self.early.takes(unit):
            self._squares[unit.index] = self._square(unit, values, threads=1)
            self.early(unit, values)

    # -- after the sums ----------------------------------------------------------------------------------------------

    def target_span(self, unit: Unit) -> Span:
        """The range of the flat buffer whose gradients this rank needs: its part of the sums, or all of its own."""
        return unit.layout.whole if self.is_local else own_span(self.mesh, self.target, unit.layout.padded)

    def reduced(self, unit: Unit) -> torch.Tensor:
        """Gradients of this rank's target range: themselves if they are in memory, else a copy.

        Shapes: [target_span(unit).numel].
        """
        accumulator = self._tensors[unit.index].get()
        return accumulator[self.target_span(unit).slice] if self.rest.is_replicated else accumulator

    def put_reduced(self, unit: Unit, values: torch.Tensor) -> None:
        """Set gradients; copies nothing if `values` are what `reduced` returned from memory."""
        if not self.rest.is_replicated:
            self._tensors[unit.index].put(values)
        elif values.data_ptr() != self.reduced(unit).data_ptr():
            self.reduced(unit).copy_(values)
        self._squares.pop(unit.index, None)

    def stored(self, unit: Unit) -> tuple[StoredTensor, int]:
        """The stored tensor of the gradients, and the offset of the range that this rank updates."""
        own = own_span(self.mesh, self.target, unit.layout.padded)
        return self._tensors[unit.index], own.start if self.rest.is_replicated else 0

    def square_sums(self, units: Iterable[Unit], *, threads: int) -> Iterator[list[float]]:
        """`square_partials` of the gradients for which this rank alone counts; a device is waited for once."""
        far: list[torch.Tensor] = []
        for unit in units:
            known = self._squares.get(unit.index)
            if known is not None:
                yield known
            elif is_on_device(values := self.reduced(unit)):
                far.append(self._own(unit, values))
            else:
                yield self._square(unit, values, threads=threads)
        if far:
            yield exact_squares.square_partials(far, block=BLOCK)

    def _square(self, unit: Unit, values: torch.Tensor, *, threads: int) -> list[float]:
        return square_partials(self._own(unit, values), block=BLOCK, threads=threads)

    def _own(self, unit: Unit, values: torch.Tensor) -> torch.Tensor:
        padded = unit.layout.padded
        share = unit.layout.whole if self.is_local else own_share(self.mesh, self.target, padded, "data")
        return values[share.shifted(-self.target_span(unit).start).slice]

    def forget_squares(self) -> None:
        """Drop the squares, because gradients begin anew."""
        if self.early is not None:
            self.early.end(is_applied=False)
        self._squares.clear()

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulators in this rank's memory; buckets in flight are counted by the arena."""
        return sum(stored.memory_bytes for stored in self._tensors)

    @property
    def swapped_bytes(self) -> int:
        """Bytes of the accumulators in this rank's swap files."""
        return sum(stored.file_bytes for stored in self._tensors)
