"""The tensors of a checkpoint with this rank's pieces of them; what is swapped is read when it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.ckpt.logical import Deferred, LogicalTensor
from mpispeed.optim.rule import KeepsState
from mpispeed.store.cell import STEP, MemoryCell
from mpispeed.store.layout import Span
from mpispeed.store.move import own_share

if TYPE_CHECKING:
    from mpispeed.ckpt.logical import Piece
    from mpispeed.engine.onebit_state import CodedTensors
    from mpispeed.engine.parts import Parts
    from mpispeed.engine.whole import Whole
    from mpispeed.optim.rule import Window
    from mpispeed.store.cell import Cell, Loan
    from mpispeed.store.table import Place, Unit


def tensors_of(
    parts: Parts,
    whole: Whole,
    windows: Sequence[Window],
    slots: Sequence[Sequence[str]],
    *,
    has_frozen: bool,
    coded: CodedTensors | None = None,
) -> Iterator[LogicalTensor]:
    """Every tensor of this stage, in the same order on all its ranks. Nothing is read from swap files yet.

    Args:
        parts: of the engine.
        whole: what this rank has of the whole model.
        windows: of the next update, for rules that keep their state themselves.
        slots: names of the optimizer state of each parameter group.
        has_frozen: frozen parameters are wanted too.
        coded: those of a 1-bit optimizer.
    """
    kept, cuts = _kept_slots(parts, whole, windows), _Cuts(parts)
    frozen = {unit.index: _rest(parts, unit) for unit in parts.table.frozen} if has_frozen else {}
    for name, param in parts.module.named_parameters():
        place, shape = parts.table.locate(param), whole.shape(name, param)
        if place is not None and place.unit.is_trainable:
            dtype = parts.params.dtypes(place.unit)[1]
            for slot, cell in _trained(parts, place.unit, slots[place.entry.group]).items():
                mean = None if coded is None else coded.mean(place, slot)
                if mean is not None:
                    pieces: Sequence[Piece] = mean
                else:
                    pieces = kept.get((name, slot), ()) if cell is None else _pieces(parts, whole, place, cell, cuts)
                yield LogicalTensor(name, slot, shape, dtype, pieces)
            if coded is not None:
                yield from coded.tensors(place, shape)
        elif place is not None and place.unit.index in frozen:
            # Every rank writes of a frozen parameter that a unit holds what it holds.
            pieces = _pieces(parts, whole, place, frozen[place.unit.index], cuts)
            yield LogicalTensor(name, "weight16", shape, parts.params.dtypes(place.unit)[0], pieces)
        elif has_frozen:
            yield whole.outside(name, "weight16", param)
    for name, buffer in persistent_buffers(parts.module):
        yield whole.outside(name, "buffer", buffer)


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of the buffers that a state dict holds."""
    names = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in names:
            yield name, buffer


def _trained(parts: Parts, unit: Unit, slots: Sequence[str]) -> Mapping[str, Cell | None]:
    """Slot -> where this rank has it of a trained unit; None: the rule has it."""
    cells = {} if parts.optimization is None else parts.optimization.states.cells(unit)
    return {"master": parts.params.master_cell(unit), **{slot: cells.get(slot) for slot in slots}}


def _kept_slots(parts: Parts, whole: Whole, windows: Sequence[Window]) -> dict[tuple[str, str], list[Piece]]:
    """(parameter, slot) -> this rank's pieces, of a rule that keeps its state itself."""
    found: dict[tuple[str, str], list[Piece]] = {}
    rule = parts.optimization.rule if parts.optimization else None
    if not isinstance(rule, KeepsState):
        return found
    for window in windows:
        unit = parts.table.units[window.key[0]]
        span = Span(window.key[2], window.key[2] + window.master.numel())
        for slot, tensor in rule.slots(window.key).items():
            for entry, common in unit.layout.overlaps(span.intersect(_share(parts, unit))):
                local = common.shifted(-span.start).slice
                pieces = whole.pieces(unit, entry.name, common.start - entry.offset, tensor.reshape(-1)[local].cpu())
                found.setdefault((entry.name, slot), []).extend(pieces)
    return found


def _rest(parts: Parts, unit: Unit) -> Cell:
    """The parameters of a unit at rest; in memory without the codes that they may rest in."""
    cell = parts.params.rest_cell(unit)
    return cell if cell.is_swapped else MemoryCell(parts.params.rest(unit))


def _share(parts: Parts, unit: Unit) -> Span:
    """The range this rank writes: an equal part of its masters that is its alone, so that all ranks write."""
    return own_share(parts.mesh, parts.params.placement, unit.layout.padded, "data")


class _Cuts:
    """(the range this rank writes, the range it holds) of each unit; asked for once per tensor, so kept."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: dict[int, tuple[Span, Span]] = {}

    def of(self, unit: Unit) -> tuple[Span, Span]:
        if unit.index not in self._known:
            params = self._parts.params
            held = params.span(unit) if unit.is_trainable else params.rest_span(unit)
            self._known[unit.index] = _share(self._parts, unit), held
        return self._known[unit.index]


def _pieces(parts: Parts, whole: Whole, place: Place, cell: Cell, cuts: _Cuts) -> tuple[Piece, ...]:
    """What this rank writes of a parameter; `cell` has the range of its unit that this rank holds."""
    share, held = cuts.of(place.unit)
    common = place.entry.span.intersect(share)
    if not common.numel:
        return ()
    local = common.shifted(-held.start)
    values = _later(parts, cell, local) if cell.is_swapped else cell.get()[local.slice].cpu()
    return whole.pieces(place.unit, place.entry.name, common.start - place.entry.offset, values)


def _later(parts: Parts, cell: Cell, span: Span) -> Deferred:
    length = parts.params.tiers.plan.window_elements

    def read(first: int, last: int) -> Iterator[torch.Tensor]:
        return read_parts(cell, Span(span.start + first, span.start + last), length)

    return Deferred(span.numel, cell.dtype, read)


def read_parts(cell: Cell, span: Span, length: int) -> Iterator[torch.Tensor]:
    """The range `span` of a cell in order, through its buffers; the next part is read while one is used.

    Args:
        cell: in memory or in a swap file.
        span: elements of it.
        length: elements that fit into a buffer, a multiple of `STEP`.

    Yields:
        Flat tensors, each of use until the next is asked for.

    Raises:
        StoreError: they could not be read.
    """
    # What is lent begins at a page: of the first part, what lies before the range is left out.
    starts = range(span.start // STEP * STEP, span.stop, length) if span.numel else ()
    ahead: Loan | None = None
    for start in starts:
        loan = ahead or cell.lend(start, min(start + length, span.stop))
        following, ahead = start + length, None
        try:
            if following < span.stop:
                ahead = cell.lend(following, min(following + length, span.stop))
            yield loan.wait()[max(span.start - start, 0) :]
        except BaseException:
            if ahead is not None:
                ahead.give_back(changed=False)
            raise
        finally:
            loan.give_back(changed=False)
