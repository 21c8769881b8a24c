"""Checkpoint state of quantized sums of gradients: the errors that ranks, and nodes, add to their next one (LoCo).

A parameter has a tensor with a row for each data rank, and where nodes have several ranks one with a row for each node,
in the slots `gradient_error` and `node_gradient_error`. Copies of a parameter whose gradients add up (tied over stages,
say) have rows of their own.

The same rows go back to where they came from. Otherwise the sum is kept: with the errors e of a rank and s of a node,
the next sums add `after * (sum(e) + sum(s)) / loss scale` to the mean gradient, where `after` is the factor behind sums
over ranks, usually 1 / ranks. So every new row is `factor * sum of old rows / new rows`, and the factor makes up for
another `after` and loss scale. With `after` 1 / ranks this is the mean of the rows. Errors are kept in 8 bits: what
comes of several rows is rounded once more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor
from mpispeed.native.codes import Grid
from mpispeed.store.layout import Span
from mpispeed.store.placement import REPLICATED, Placement
from mpispeed.store.transfers import all_gather_into, own_span

if TYPE_CHECKING:
    from mpispeed.ckpt.format.logical import Piece
    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.state.global_layout import GlobalLayout
    from mpispeed.mesh.compressed.quantized import Feedback
    from mpispeed.sharding.reducers import QuantizedReducer
    from mpispeed.store.layout import Entry, Place, Unit

log = logging.getLogger(__name__)

RANK_ERROR, NODE_ERROR = "gradient_error", "node_gradient_error"
KEY = "gradient_errors"
"""Entry of the optimizer's state tree."""

_STEP = 1 << 20
"""Elements handled at once."""


@dataclass(frozen=True, slots=True)
class _Hop:
    """The errors that this rank keeps for one hop of a unit's sums.

    Attributes:
        name: of the hop in `Feedback`.
        slot: of its tensor.
        row: of this rank, among `rows`.
        span: range of the unit's buffer that the errors belong to.
        grid: blocks of that range.
    """

    name: str
    slot: str
    row: int
    rows: int
    span: Span
    grid: Grid


def _copies(parts: Parts, unit: Unit) -> tuple[int, int]:
    """This rank's number among the copies of the unit whose gradients add up, and their count."""
    number, count = 0, 1
    for comm in parts.sharing.summed_over(unit) if parts.sharing is not None else ():
        number, count = number * comm.size + comm.rank, count * comm.size
    return number, count


def _hops(parts: Parts, quantized: QuantizedReducer, unit: Unit) -> list[_Hop]:
    """The hops after which rounding is left, as in `quantized_reduce_scatter`: the second one only inside of nodes."""
    (inner, outer), mesh, padded = quantized.axes, parts.mesh, unit.layout.padded
    ranks, nodes = mesh["data"].size, mesh[outer].size
    copy, copies = _copies(parts, unit)
    piece = padded // ranks
    whole = Grid(piece, quantized.block, ranks)
    row = copy * ranks + mesh.index("data")
    found = [_Hop("first", RANK_ERROR, row, copies * ranks, Span(0, padded), whole)]
    if mesh[inner].size > 1:
        part = own_span(mesh, Placement((inner,)), padded)
        grid = Grid(piece, quantized.block, nodes)
        found.append(_Hop("second", NODE_ERROR, copy * nodes + mesh.index(outer), copies * nodes, part, grid))
    return found


# -- saving ----------------------------------------------------------------------------------------------------------


class ErrorTensors:
    """The errors as tensors of a checkpoint.

    There are none in the middle of a step: its micro-batches, which are replayed, have changed the errors already.
    """

    def __init__(self, parts: Parts, whole: GlobalLayout, quantized: QuantizedReducer) -> None:
        """Collective over: all ranks."""
        self._parts, self._whole, self._quantized = parts, whole, quantized
        found = parts.mesh.world.comm.gather_objects((parts.counters.pending_backwards, quantized.uses))
        self._uses = 0 if any(pending for pending, _ in found) else max(uses for _, uses in found)

    def mean(self, place: Place, slot: str) -> None:
        """None: optimizer states are the same on all data ranks."""

    def tensors(self, place: Place, shape: tuple[int, ...]) -> Iterator[LogicalTensor]:
        """The errors of one parameter, whose logical shape is `shape`; read as they are written."""
        parts, unit = self._parts, place.unit
        feedback = _feedback(self._quantized, unit) if self._uses else None
        if feedback is None:
            return
        for hop in _hops(parts, self._quantized, unit):
            pieces = self._pieces(place, hop, feedback, hop.row * math.prod(shape))
            yield LogicalTensor(place.entry.name, hop.slot, (hop.rows, *shape), torch.float32, pieces)

    def _pieces(self, place: Place, hop: _Hop, feedback: Feedback, before: int) -> tuple[Piece, ...]:
        unit, entry = place.unit, place.entry
        common = entry.span.intersect(hop.span)
        if not common.numel:
            return ()
        origin = common.start - hop.span.start

        def read(first: int, last: int) -> Iterator[torch.Tensor]:
            for start in range(first, last, _STEP):
                yield feedback.values(hop.name, origin + start, origin + min(start + _STEP, last))

        values = Deferred(common.numel, torch.float32, read, is_in_memory=True)
        made = self._whole.pieces(unit, entry.name, common.start - entry.offset, values, before=before)
        has_own_rows = _copies(self._parts, unit)[1] > 1
        return tuple(replace(piece, is_replica=False) for piece in made) if has_own_rows else made

    def state(self) -> dict[str, Any]:
        """What the errors depend on, for the state tree; empty where none are saved."""
        if not self._uses:
            return {}
        grads = self._parts.optimization.grads  # type: ignore[union-attr]
        return {KEY: {"uses": self._uses, "after": grads.sums.averaging.after, "loss_scale": self._parts.scaler.scale}}


def _feedback(quantized: QuantizedReducer, unit: Unit) -> Feedback | None:
    """The error feedback of a unit; None if the unit is not quantized."""
    return quantized.feedback_of(unit) if quantized.takes(unit, unit.states.wire) else None


# -- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sums:
    """A unit whose rows were saved at another layout: of each hop this rank's part of what every row becomes."""

    unit: Unit
    parts: tuple[torch.Tensor, ...]


def read(parts: Parts, source: Checkpoint, state: Mapping[str, Any], whole: GlobalLayout) -> list[Sums]:
    """Read the errors of this rank, and sums of rows for `spread`. Local; the loss scale has been loaded.

    Raises:
        CheckpointError: they are damaged.
    """
    quantized = parts.optimization.quantized if parts.optimization else None
    if quantized is None:
        return []
    saved, names = state.get("optimizer", {}).get(KEY), set(source.names())
    stored = {name for name in names if RANK_ERROR in source.slots(name)}
    if saved is None or not stored:
        level = logging.INFO if parts.mesh.rank == 0 else logging.DEBUG
        log.log(level, "no errors of quantized gradients in %s: they begin at zero", source.path)
        return []
    uses, factor = _numbers(parts, source, saved)
    for name in names:
        _check_shapes(source, name)
    found = []
    for unit in parts.table.units:
        feedback = _feedback(quantized, unit)
        if feedback is None:
            continue
        hops, entries = _hops(parts, quantized, unit), [e for e in unit.layout.entries if e.name in stored]
        feedback.uses = uses
        if _has_same_rows(source, hops, entries):
            for hop in hops:
                feedback.put(hop.name, hop.grid, _own_rows(source, whole, hop, entries, factor))
        else:
            found.append(_sums(parts, quantized, source, whole, unit, hops, entries, factor))
    return found


def spread(parts: Parts, sums: Iterable[Sums]) -> None:
    """Gather the parts of sums that ranks have read, and keep them as errors. Collective over: the data axis."""
    quantized = parts.optimization.quantized if parts.optimization else None
    if quantized is None:
        return
    inner, outer = quantized.axes
    for each in sums:
        feedback, padded = _feedback(quantized, each.unit), each.unit.layout.padded
        if feedback is None:
            continue
        for hop, part in zip(_hops(parts, quantized, each.unit), each.parts, strict=True):
            values = torch.empty(hop.span.numel)
            target = REPLICATED if hop.name == "first" else Placement((inner,))
            all_gather_into(parts.mesh, values, part, Placement((inner, outer)), target, padded)
            feedback.put(hop.name, hop.grid, values)


def _numbers(parts: Parts, source: Checkpoint, saved: Any) -> tuple[int, float]:
    """Sums since errors began, and the factor of errors, from the state tree.

    Raises:
        CheckpointError: they are impossible.
    """
    found: list[Any] = [saved.get(key) if isinstance(saved, Mapping) else None for key in _NUMBERS]
    uses, after, scale = found
    is_count = isinstance(uses, int) and not isinstance(uses, bool) and uses >= 0
    if not is_count or not all(isinstance(x, float) and math.isfinite(x) and x > 0 for x in (after, scale)):
        msg = (
            f"{KEY} in the state of {source.path} are {saved!r}, expected a count and two positive numbers; the file "
            "is damaged: load with load_optimizer_states=False"
        )
        raise CheckpointError(msg)
    grads = parts.optimization.grads  # type: ignore[union-attr]
    return uses, (after / grads.sums.averaging.after) * (parts.scaler.scale / scale)


_NUMBERS = ("uses", "after", "loss_scale")


def _check_shapes(source: Checkpoint, name: str) -> None:
    """Raises CheckpointError if a tensor of errors has an impossible shape."""
    own, ranks = tuple(source.info(name).shape), math.prod(source.layout.get(axis, 1) for axis in _AXES)
    for slot in {RANK_ERROR, NODE_ERROR}.intersection(source.slots(name)):
        shape = tuple(source.stored(name, slot).shape)
        if shape[1:] != own or not (shape and 1 <= shape[0] <= ranks):
            msg = f"{name}/{slot} in {source.path} is of shape {shape}, expected (1 to {ranks}, then {own}); "
            msg += "the file is damaged: load with load_optimizer_states=False"
            raise CheckpointError(msg)


_AXES = ("pipe", "data", "model")


def _rows(source: Checkpoint, name: str, slot: str) -> int:
    return source.stored(name, slot).shape[0] if slot in source.slots(name) else 0


def _has_same_rows(source: Checkpoint, hops: Iterable[_Hop], entries: Iterable[Entry]) -> bool:
    """True if errors were saved by as many ranks and nodes as there are now."""
    own = {RANK_ERROR: 0, NODE_ERROR: 0} | {hop.slot: hop.rows for hop in hops}
    return all(_rows(source, entry.name, slot) == rows for entry in entries for slot, rows in own.items())


def _own_rows(
    source: Checkpoint, whole: GlobalLayout, hop: _Hop, entries: Iterable[Entry], factor: float
) -> torch.Tensor:
    values = torch.zeros(hop.span.numel)
    for entry in entries:
        common = entry.span.intersect(hop.span)
        if common.numel:
            out = values[common.shifted(-hop.span.start).slice]
            whole.read(source, entry.name, hop.slot, common.start - entry.offset, out, row=hop.row)
    return _checked(source, values.mul_(factor), hop.slot, entries)


def _sums(
    parts: Parts,
    quantized: QuantizedReducer,
    source: Checkpoint,
    whole: GlobalLayout,
    unit: Unit,
    hops: list[_Hop],
    entries: Iterable[Entry],
    factor: float,
) -> Sums:
    """What each row becomes, on this rank's part of the unit. Errors of nodes go to ranks where nodes have none."""
    span, slots = own_span(parts.mesh, Placement(quantized.axes), unit.layout.padded), (RANK_ERROR, NODE_ERROR)
    totals = {slot: torch.zeros(span.numel) for slot in slots}
    for entry in entries:
        common = entry.span.intersect(span)
        for slot in slots:
            out = totals[slot][common.shifted(-span.start).slice] if common.numel else totals[slot][:0]
            _read_total(source, whole, entry.name, slot, common.start - entry.offset, out)
    if len(hops) == 1:
        totals[RANK_ERROR] += totals[NODE_ERROR]
    made = (_checked(source, totals[hop.slot].mul_(factor / hop.rows), hop.slot, entries) for hop in hops)
    return Sums(unit, tuple(made))


def _read_total(source: Checkpoint, whole: GlobalLayout, name: str, slot: str, start: int, out: torch.Tensor) -> None:
    """Fill `out` with the sum of all rows, added in order in fp64."""
    for first in range(0, out.numel(), _STEP):
        part = out[first : first + _STEP]
        values, total = torch.empty_like(part), torch.zeros(part.numel(), dtype=torch.float64)
        for row in range(_rows(source, name, slot)):
            whole.read(source, name, slot, start + first, values, row=row)
            total += values
        part.copy_(total)


def _checked(source: Checkpoint, values: torch.Tensor, slot: str, entries: Iterable[Entry]) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        names = ", ".join(entry.name for entry in entries)
        msg = f"{slot} of {names} in {source.path} is not finite; the file is damaged: load with "
        msg += "load_optimizer_states=False"
        raise CheckpointError(msg)
    return values
