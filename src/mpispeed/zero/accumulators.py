"""Where gradients rest: cells, and what of those in swap files is on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.base.device import is_on_device
from mpispeed.base.errors import StoreError, UsageError
from mpispeed.native import exact_squares
from mpispeed.native.reduce import square_partials
from mpispeed.store.cell import SwapCell
from mpispeed.store.layout import BLOCK
from mpispeed.store.move import own_share, own_span
from mpispeed.store.tiers import GRAD, Tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.arena import Arena
    from mpispeed.store.cell import Carried, Cell
    from mpispeed.store.layout import Span
    from mpispeed.store.placement import Placement
    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.early import EarlyExchange

WRITES_BEHIND = 2
"""Units whose gradients may be on their way to disk while others are summed."""


_CODED_ALREADY = (
    "a backward pass after the gradients of this step were coded: with overlap_comm a 1-bit optimizer takes one "
    "backward pass at an accumulation boundary; add the losses, or set zero_optimization.overlap_comm to false"
)


class Accumulators:
    """One accumulator per unit, whole or cut, in memory or in a swap file.

    A swapped one is replaced by a buffer while its unit is summed. What the disk refuses is kept for `drain`: sums go
    on meanwhile, because other ranks take part in them.
    """

    arena: Arena
    _communicate: torch.dtype | None = None  # dtype of messages; None: in the dtype that each unit came in
    early: EarlyExchange | None = None
    _has_several = False  # several backward passes were made over gradients that had been summed
    is_early = False  # local gradients are coded as they come, by `early`
    is_local = False  # gradients are this rank's own and rest whole: nothing sums them, and all of them is looked at

    def __init__(
        self, table: Table, mesh: Mesh, rest: Placement, target: Placement, dtype: Callable[[Unit], torch.dtype],
        tiers: Tiers,
    ) -> None:  # fmt: skip
        """Zeros; `rest` is how accumulators are cut, `target` which range of a unit this rank needs."""
        self.table, self.mesh, self.rest, self.target = table, mesh, rest, target
        self._behind = WRITES_BEHIND if tiers.plan.writes_behind else 0
        self._cells = [
            tiers.zeros(GRAD, unit.index, own_span(mesh, rest, unit.layout.padded).numel, dtype(unit))
            for unit in table.units
        ]
        # Buffers of one length serve units of any: the arena would keep some for every length.
        swapped = [cell for cell in self._cells if cell.is_swapped]
        self._longest = {d: max(c.numel for c in swapped if c.dtype == d) for d in {c.dtype for c in swapped}}
        self._buffers: dict[int, torch.Tensor] = {}  # by unit
        self._problem = ""
        self._squares: dict[int, list[float]] = {}
        self._writes: dict[int, Carried] = {}  # by unit, oldest first

    def wire_dtype(self, unit: Unit) -> torch.dtype:
        """In which gradients of the unit travel."""
        return unit.dtype if self._communicate is None or unit.dtype == torch.float64 else self._communicate

    # -- while a unit is summed --------------------------------------------------------------------------------------

    def whole(self, unit: Unit) -> torch.Tensor:
        """The accumulator itself, where it rests whole in memory. Shapes: [padded]."""
        return self._cells[unit.index].get()

    def begin(self, unit: Unit, *, reads: bool) -> torch.Tensor:
        """What a sum goes into: the range needed here, or a buffer in its place; `reads` if it adds to what is there.

        Shapes: [target_span(unit).numel].
        """
        cell = self._cells[unit.index]
        if not isinstance(cell, SwapCell):
            return self.reduced(unit)
        self._take_back(unit.index)
        buffer = self._buffers[unit.index] = self.arena.take(self._longest[cell.dtype], cell.dtype, on_host=True)
        values = buffer[: cell.numel]
        if reads:
            self._await(cell.start_get(values))
        return values

    def end(self, unit: Unit, target: torch.Tensor, *, squares: bool) -> None:
        """Take back what `begin` gave; a last sum is squared while it is in memory."""
        cell = self._cells[unit.index]
        if not isinstance(cell, SwapCell):
            return
        self._squares.pop(unit.index, None)
        if squares:
            self._squares[unit.index] = self._square(unit, target, threads=1)
        self._writes[unit.index] = cell.start_put(target)
        while len(self._writes) > self._behind:
            self._take_back(next(iter(self._writes)))

    def copied(self, unit: Unit) -> torch.Tensor:
        """A copy of what `begin` gives. Shapes: [target_span(unit).numel]."""
        target = self.begin(unit, reads=True)
        copy = target.clone()
        self._free(unit.index)
        return copy

    def _free(self, index: int) -> None:
        if index in self._buffers:
            self.arena.give(self._buffers.pop(index))

    def _take_back(self, index: int) -> None:
        """Wait until gradients of a unit that are being written are."""
        if index in self._writes:
            self._await(self._writes.pop(index))
            self._free(index)

    def _await(self, carried: Carried) -> None:
        try:
            carried.wait()
        except StoreError as error:
            self._problem = self._problem or str(error)

    def drain(self) -> None:
        """Wait for the disk, and agree that it took and gave all.

        Collective over: the data axis, where accumulators are swapped.

        Raises:
            StoreError: on every rank, if swapped gradients of one could not be read or written.
        """
        for index in list(self._writes):
            self._take_back(index)
        if any(cell.is_swapped for cell in self._cells):
            self._square_swapped()
            self.mesh["data"].agree(not self._problem, self._problem, StoreError)

    def _square_swapped(self) -> None:
        """Squares of what was read back or set since its last sum: `square_sums` then reads nothing that can fail."""
        for unit, cell in zip(self.table.units, self._cells, strict=True):
            if cell.is_swapped and unit.index not in self._squares and not self._problem:
                try:
                    self._squares[unit.index] = self._square(unit, cell.get(), threads=1)
                except StoreError as error:
                    self._problem = str(error)

    def _choose_early(self, *, is_again: bool) -> None:
        """Whether the backward pass that begins codes units as they come.

        A second pass over the same gradients cannot; a script that has made one before is not coded early again.

        Raises:
            UsageError: units were coded already, and none of the passes before has shown that there are several.
        """
        if is_again and self.is_early:
            raise UsageError(_CODED_ALREADY)
        self._has_several = self._has_several or is_again
        self.is_early = self.early is not None and self.is_local and not self._has_several and self.early.is_ready()

    def _code(self, unit: Unit, values: torch.Tensor) -> None:
        """Code local gradients now, unless they are summed over other axes first; their squares are kept."""
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
        accumulator = self._cells[unit.index].get()
        return accumulator[self.target_span(unit).slice] if self.rest.is_whole else accumulator

    def put_reduced(self, unit: Unit, values: torch.Tensor) -> None:
        """Set gradients; nothing is copied of what `reduced` returned from memory."""
        if not self.rest.is_whole:
            self._cells[unit.index].put(values)
        elif values.data_ptr() != self.reduced(unit).data_ptr():
            self.reduced(unit).copy_(values)
        self._squares.pop(unit.index, None)

    def cell(self, unit: Unit) -> tuple[Cell, int]:
        """Where gradients rest, and where in it the range begins that this rank updates."""
        own = own_span(self.mesh, self.target, unit.layout.padded)
        return self._cells[unit.index], own.start if self.rest.is_whole else 0

    def square_sums(self, units: Iterable[Unit], *, threads: int) -> Iterator[list[float]]:
        """`square_partials` of the parts of the gradients that are this rank's alone; a device is waited for once."""
        far: list[torch.Tensor] = []
        for unit in units:
            known = self._squares.get(unit.index)
            if known is not None:
                yield known
            elif is_on_device(values := self.reduced(unit)):
                far.append(self._own(unit, values))
            else:
                yield self._square(unit, values, threads=threads)
        yield exact_squares.square_partials(far, block=BLOCK)

    def _square(self, unit: Unit, values: torch.Tensor, *, threads: int) -> list[float]:
        return square_partials(self._own(unit, values), block=BLOCK, threads=threads)

    def _own(self, unit: Unit, values: torch.Tensor) -> torch.Tensor:
        padded = unit.layout.padded
        share = unit.layout.whole if self.is_local else own_share(self.mesh, self.target, padded, "data")
        return values[share.shifted(-self.target_span(unit).start).slice]

    def forget_squares(self) -> None:
        """Gradients begin anew."""
        if self.early is not None:
            self.early.end(is_applied=False)
        self._squares.clear()

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulators in this rank's memory; buckets in flight are counted by the arena."""
        return sum(cell.memory_bytes for cell in self._cells)

    @property
    def swapped_bytes(self) -> int:
        """Bytes of the accumulators in this rank's swap files."""
        return sum(cell.file_bytes for cell in self._cells)
