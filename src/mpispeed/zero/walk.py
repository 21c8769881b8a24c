"""Windows over this rank's masters, gradients and optimizer state: what an update rule sees."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError
from mpispeed.optim.rule import Window
from mpispeed.store.layout import Span
from mpispeed.store.tiers import IN_MEMORY, Tiers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from mpispeed.store.cell import Cell, Loan
    from mpispeed.store.layout import Entry
    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.grads import GradStore
    from mpispeed.zero.params import ParamStore


class StateStore:
    """Optimizer state of this rank: one flat tensor per slot and unit, cut as the masters are."""

    def __init__(self, table: Table, params: ParamStore, slots: Sequence[str], tiers: Tiers = IN_MEMORY) -> None:
        """Zeros; args: `tiers` says which of them rest in swap files."""
        self.slots = tuple(slots)
        self.edits = 0  # how often slots were set by something else than an update
        self._cells = [
            {
                slot: tiers.zeros(slot, unit.index, params.span(unit).numel, params.dtypes(unit)[1])
                for slot in self.slots
            }
            for unit in table.units
        ]

    def cells(self, unit: Unit) -> Mapping[str, Cell]:
        """Slot name -> where it is."""
        return self._cells[unit.index]

    def of(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Slot name -> flat tensor over the unit's master span: itself if it is in memory, else a copy."""
        return {slot: cell.get() for slot, cell in self._cells[unit.index].items()}

    def put(self, unit: Unit, values: Mapping[str, torch.Tensor]) -> None:
        """Set slots; nothing is copied of what `of` returned from memory."""
        self.edits += 1
        for slot, tensor in values.items():
            self._cells[unit.index][slot].put(tensor)

    def clear(self) -> None:
        """Set everything to zero."""
        for cells in self._cells:
            for cell in cells.values():
                cell.clear()

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots in this rank's memory."""
        return sum(cell.memory_bytes for cells in self._cells for cell in cells.values())

    @property
    def swapped_bytes(self) -> int:
        """Bytes of all slots in this rank's swap files."""
        return sum(cell.file_bytes for cells in self._cells for cell in cells.values())


@dataclass(slots=True)
class _Borrowed:
    """What one chunk of a unit needs of its cells."""

    unit: Unit
    chunk: Span
    master: Loan
    grad: Loan
    state: dict[str, Loan]
    out: Loan | None

    def loans(self) -> list[Loan]:
        """All of them."""
        out = [] if self.out is None else [self.out]
        return [self.master, *self.state.values(), *out, self.grad]

    def give_back(self, *, changed: bool) -> None:
        """All of them, also if one cannot be written; gradients are never changed."""
        failure: StoreError | None = None
        for loan in self.loans():
            try:
                loan.give_back(changed=changed and loan is not self.grad)
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class Walker:
    """Yields the windows of one update, in unit order.

    A window is done when the next one is asked for. What rests in swap files is read one chunk ahead and written
    behind, as the plan of the tiers says; windows end where chunks do.

    Source: ZeRO-Infinity (arXiv 2104.07857), infinity offload engine: the overlap of disk and update.
    """

    def __init__(self, params: ParamStore, grads: GradStore, state: StateStore, *, per_parameter: bool) -> None:
        """Args: `per_parameter` asks for one window per whole parameter; it needs whole masters."""
        self._params, self._grads, self._state = params, grads, state
        self._per_parameter = per_parameter and params.placement.is_whole
        self._plan = params.tiers.plan

    @property
    def is_swapping(self) -> bool:
        """True if a rank may have something in swap files."""
        return self._params.tiers.is_swapping

    def windows(self, groups: Sequence[dict[str, Any]], step: int) -> Generator[Window, None, None]:
        """All windows of this rank for update number `step`.

        Raises:
            StoreError: a swap file cannot be read or written.
        """
        yield from self._walk(self._params.table.units, groups, step)

    def windows_of(self, unit: Unit, groups: Sequence[dict[str, Any]], step: int) -> Iterator[Window]:
        """The windows of one unit."""
        yield from self._walk((unit,), groups, step)

    def _walk(self, units: Sequence[Unit], groups: Sequence[dict[str, Any]], step: int) -> Iterator[Window]:
        waiting: deque[_Borrowed] = deque()
        try:
            for unit, chunk in self._chunks(units):
                waiting.append(self._borrow(unit, chunk))
                if len(waiting) > self._plan.reads_ahead:
                    yield from self._serve(waiting, groups, step)
            while waiting:
                yield from self._serve(waiting, groups, step)
        finally:
            for borrowed in waiting:
                borrowed.give_back(changed=False)
        self._params.tiers.settle()

    def _serve(self, waiting: deque[_Borrowed], groups: Sequence[dict[str, Any]], step: int) -> Iterator[Window]:
        borrowed, changed = waiting[0], False
        try:
            for loan in borrowed.loans():
                loan.wait()
            for group, span, entry in self._ranges(borrowed.unit):
                common = span.intersect(borrowed.chunk)
                if common.numel:
                    window, far = self._window(borrowed, group, common, groups[group], step, entry)
                    yield window
                    if far is not None:
                        self._bring(far, window)
            changed = True
        finally:
            waiting.popleft()
            borrowed.give_back(changed=changed)
        if not self._plan.writes_behind:
            self._params.tiers.settle()

    def _chunks(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Span]]:
        for unit in units:
            own = self._params.span(unit)
            cells = [self._params.master_cell(unit), self._grads.cell(unit)[0], *self._state.cells(unit).values()]
            low = self._params.low_precision(unit)
            length = own.numel
            if any(cell.is_swapped for cell in cells) or (low is not None and low[0].is_swapped):
                length = min(length, self._plan.window_elements)
            for start in range(0, own.numel, max(length, 1)):
                yield unit, Span(own.start + start, own.start + min(start + length, own.numel))

    def _borrow(self, unit: Unit, chunk: Span) -> _Borrowed:
        local = chunk.shifted(-self._params.span(unit).start)
        low, (grad, at) = self._params.low_precision(unit), self._grads.cell(unit)
        state = {slot: cell.lend(local.start, local.stop) for slot, cell in self._state.cells(unit).items()}
        out = None if low is None else low[0].lend(low[1] + local.start, low[1] + local.stop, reads=False)
        master = self._params.master_cell(unit).lend(local.start, local.stop)
        return _Borrowed(unit, chunk, master, grad.lend(at + local.start, at + local.stop), state, out)

    def _ranges(self, unit: Unit) -> Iterator[tuple[int, Span, Entry | None]]:
        if self._per_parameter:
            for entry in unit.layout.entries:
                yield entry.group, entry.span, entry
        else:
            for group, span in unit.layout.group_spans():
                yield group, span, None

    def _window(
        self, borrowed: _Borrowed, index: int, span: Span, group: dict[str, Any], step: int, entry: Entry | None
    ) -> tuple[Window, torch.Tensor | None]:
        """A window, and what has to be filled afterwards because it is in other memory than the master."""
        local = span.shifted(-borrowed.chunk.start).slice
        master, far = borrowed.master.wait()[local], None
        out = None if borrowed.out is None else borrowed.out.wait()[local]
        if out is not None and out.device != master.device:
            # Rounded by the update, so that only the rounded values are copied.
            far, out = out, _room_beside(master, out) if out.dtype != master.dtype else None
        window = Window(
            master=master,
            grad=borrowed.grad.wait()[local].to(master.device),
            state={slot: loan.wait()[local] for slot, loan in borrowed.state.items()},
            group=group,
            step=step,
            out=out,
            key=(borrowed.unit.index, index, span.start),
            shape=None if entry is None else entry.shape,
        )
        return window, far

    def _bring(self, far: torch.Tensor, window: Window) -> None:
        """Copy what an update has made to other memory.

        To a device beside what follows, unless the source is a buffer that something else is read into; the host may
        look at once.
        """
        is_kept = window.out is not None or not self.is_swapping
        source = window.master if window.out is None else window.out
        far.copy_(source, non_blocking=is_kept and devices.is_on_device(far))


def _room_beside(master: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As long and of the dtype as `out`, in the memory of `master`."""
    if devices.is_on_device(master):
        return torch.empty(out.numel(), dtype=out.dtype, device=master.device)
    return devices.pinned(out.numel(), out.dtype)
