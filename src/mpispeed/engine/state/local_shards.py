"""Logical tensors of a checkpoint with this rank's pieces; pieces in swap files are read only as they are written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.ckpt.format.logical import Deferred, LogicalTensor
from mpispeed.nn.buffers import persistent_buffers
from mpispeed.optim.rule import KeepsState
from mpispeed.store.layout import Span
from mpispeed.store.stored_tensor import STEP, MemoryTensor
from mpispeed.store.transfers import own_share

if TYPE_CHECKING:
    from mpispeed.ckpt.format.logical import Piece
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.state.global_layout import GlobalLayout
    from mpispeed.engine.state.onebit_state import CodedTensors
    from mpispeed.optim.rule import Window
    from mpispeed.store.stored_tensor import Lease, StoredTensor
    from mpispeed.store.table import Place, Unit


def tensors_of(
    parts: Parts,
    whole: GlobalLayout,
    windows: Sequence[Window],
    slots: Mapping[str, Collection[str]],
    *,
    has_frozen: bool,
    onebit: CodedTensors | None = None,
) -> Iterator[LogicalTensor]:
    """All tensors of this stage, in the same order on all its ranks. Nothing is read from swap files yet.

    Args:
        parts: components of the engine.
        whole: this rank's part in the whole model.
        windows: windows of the next update, for rules that keep their own state.
        slots: names of the optimizer states of each parameter.
        has_frozen: include frozen parameters.
        onebit: additional tensors of a 1-bit optimizer.
    """
    kept, cuts = _kept_slots(parts, whole, windows), _Cuts(parts)
    frozen = {unit.index: _rest(parts, unit) for unit in parts.table.frozen} if has_frozen else {}
    for name, param in parts.module.named_parameters():
        place, shape = parts.table.locate(param), whole.shape(name, param)
        if place is not None and place.unit.is_trainable:
            dtype = parts.params.shards.dtypes(place.unit)[1]
            for slot, holder in _trained(parts, place.unit, sorted(slots.get(name, ()))).items():
                mean = None if onebit is None else onebit.mean(place, slot)
                if mean is not None:
                    pieces: Sequence[Piece] = mean
                else:
                    pieces = (
                        kept.get((name, slot), ()) if holder is None else _pieces(parts, whole, place, holder, cuts)
                    )
                yield LogicalTensor(name, slot, shape, dtype, pieces)
            if onebit is not None:
                yield from onebit.tensors(place, shape)
        elif place is not None and place.unit.index in frozen:
            # Frozen parameters of a unit are sharded too: every rank writes its part.
            pieces = _pieces(parts, whole, place, frozen[place.unit.index], cuts)
            yield LogicalTensor(name, "weight16", shape, parts.params.shards.dtypes(place.unit)[0], pieces)
        elif has_frozen:
            yield whole.outside(name, "weight16", param)
    for name, buffer in persistent_buffers(parts.module):
        yield whole.outside(name, "buffer", buffer)


def _trained(parts: Parts, unit: Unit, slots: Sequence[str]) -> Mapping[str, StoredTensor | None]:
    """Slot -> stored tensor of a trained unit; None for slots kept by the rule."""
    holders = {} if parts.optimization is None else parts.optimization.states.tensors(unit)
    return {"master": parts.params.shards.stored_master(unit), **{slot: holders.get(slot) for slot in slots}}


def _kept_slots(parts: Parts, whole: GlobalLayout, windows: Sequence[Window]) -> dict[tuple[str, str], list[Piece]]:
    """(parameter, slot) -> this rank's pieces, for a rule that keeps its own state."""
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


def _rest(parts: Parts, unit: Unit) -> StoredTensor:
    """This rank's shard of a unit's parameters; dequantized if it is in memory."""
    holder = parts.params.shards.stored_shard(unit)
    return holder if holder.is_swapped else MemoryTensor(parts.params.shards.rest(unit))


def _share(parts: Parts, unit: Unit) -> Span:
    """The range this rank writes: its masters divided among their replicas, so that all ranks write equal parts."""
    return own_share(parts.mesh, parts.params.shards.placement, unit.layout.padded, "data")


class _Cuts:
    """Cache of (range this rank writes, range it holds) by unit, as every tensor asks for it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: dict[int, tuple[Span, Span]] = {}

    def of(self, unit: Unit) -> tuple[Span, Span]:
        if unit.index not in self._known:
            params = self._parts.params
            held = params.shards.span(unit) if unit.is_trainable else params.shards.rest_span(unit)
            self._known[unit.index] = _share(self._parts, unit), held
        return self._known[unit.index]


def _pieces(parts: Parts, whole: GlobalLayout, place: Place, holder: StoredTensor, cuts: _Cuts) -> tuple[Piece, ...]:
    """This rank's pieces of a parameter; `holder` has the range of the unit that this rank holds."""
    share, held = cuts.of(place.unit)
    common = place.entry.span.intersect(share)
    if not common.numel:
        return ()
    local = common.shifted(-held.start)
    values = _later(parts, holder, local) if holder.is_swapped else holder.get()[local.slice].cpu()
    return whole.pieces(place.unit, place.entry.name, common.start - place.entry.offset, values)


def _later(parts: Parts, holder: StoredTensor, span: Span) -> Deferred:
    length = parts.params.tiers.plan.window_elements

    def read(first: int, last: int) -> Iterator[torch.Tensor]:
        return read_parts(holder, Span(span.start + first, span.start + last), length)

    return Deferred(span.numel, holder.dtype, read)


def read_parts(holder: StoredTensor, span: Span, length: int) -> Iterator[torch.Tensor]:
    """Read the range `span` of a stored tensor in order; the next part is read while one is used.

    Args:
        holder: the tensor, in memory or in a swap file.
        span: range of elements.
        length: elements per buffer, a multiple of `STEP`.

    Yields:
        Flat tensors, each valid until the next is requested.

    Raises:
        StoreError: the file could not be read.
    """
    # Leases begin at a page: elements of the first part before the range are left out.
    starts = range(span.start // STEP * STEP, span.stop, length) if span.numel else ()
    ahead: Lease | None = None
    for start in starts:
        lease = ahead or holder.lend(start, min(start + length, span.stop))
        following, ahead = start + length, None
        try:
            if following < span.stop:
                ahead = holder.lend(following, min(following + length, span.stop))
            yield lease.wait()[max(span.start - start, 0) :]
        except BaseException:
            if ahead is not None:
                ahead.give_back(changed=False)
            raise
        finally:
            lease.give_back(changed=False)
