"""Quantized sums of gradients, and the errors that ranks and nodes add to their next one (LoCo) in checkpoints.

Where ranks code their own gradients, a parameter has a tensor with a row for each data rank, in the slot
`gradient_error`; where sums of nodes with several ranks are coded, one with a row for each node, in
`node_gradient_error`. Copies of a parameter whose gradients add up (tied over stages, say) have rows of their own.

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
from mpispeed.exchange.strategy import ExchangeStrategy
from mpispeed.native.codes import Grid
from mpispeed.store.layout import Span
from mpispeed.store.placement import REPLICATED, Placement
from mpispeed.store.transfers import all_gather_into, own_span

if TYPE_CHECKING:
    from mpispeed.ckpt.format.logical import Piece
    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.exchange.saved import Layout, Loading, Run
    from mpispeed.mesh.compressed.quantized import Feedback
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.sharding.quantized import QuantizedReducer
    from mpispeed.sharding.reducers import SumGradients
    from mpispeed.store.layout import Entry, Place, Table, Unit

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


class QuantizedSums(ExchangeStrategy):
    """Sums of gradients whose messages are quantized with error feedback.

    Attributes:
        reducer: has the errors.
        after: the factor behind sums over ranks.
    """

    has_scaled_state = True

    def __init__(self, mesh: Mesh, table: Table, sums: SumGradients, reducer: QuantizedReducer, rule: Rule) -> None:
        """Args: `sums` are carried out by `reducer`."""
        super().__init__(sums, rule)
        self.mesh, self.table, self.reducer, self.after = mesh, table, reducer, sums.averaging.after
        self._read: list[Sums] = []

    def memory(self) -> dict[str, int]:
        """The errors."""
        return {"errors of quantized sums": self.reducer.error_bytes}

    def saved(self, run: Run) -> ErrorTensors:
        """The errors. Collective over: all ranks."""
        return ErrorTensors(self, run)

    def read_scaled(self, loading: Loading) -> None:
        """As `read`. Local."""
        self._read = read(self, loading)

    def spread_scaled(self) -> None:
        """Gather the parts of sums that ranks have read, and keep them as errors. Collective over: the data axis."""
        sums, self._read = self._read, []
        for each in sums:
            _spread(self, each)

    def feedback_of(self, unit: Unit) -> Feedback | None:
        """The error feedback of a unit; None if the unit is not quantized."""
        return self.reducer.feedback_of(unit) if self.reducer.takes(unit, unit.states.wire) else None

    def hops(self, run: Run, unit: Unit) -> list[_Hop]:
        """The coded hops, which leave rounding, as in `quantized_reduce_scatter`; in nodes of one rank it has one."""
        (inner, outer), mesh, padded = self.reducer.axes, self.mesh, unit.layout.padded
        ranks, nodes = mesh["data"].size, mesh[outer].size
        copy, copies = _copies(run, unit)
        piece = padded // ranks
        whole = Grid(piece, self.reducer.block, ranks)
        row = copy * ranks + mesh.index("data")
        found = []
        if self.reducer.codes_inner or mesh[inner].size == 1:
            found.append(_Hop("first", RANK_ERROR, row, copies * ranks, Span(0, padded), whole))
        if mesh[inner].size > 1 and nodes > 1:
            part = own_span(mesh, Placement((inner,)), padded)
            grid = Grid(piece, self.reducer.block, nodes)
            found.append(_Hop("second", NODE_ERROR, copy * nodes + mesh.index(outer), copies * nodes, part, grid))
        return found


def _copies(run: Run, unit: Unit) -> tuple[int, int]:
    """This rank's number among the copies of the unit whose gradients add up, and their count."""
    number, count = 0, 1
    for comm in run.copies(unit):
        number, count = number * comm.size + comm.rank, count * comm.size
    return number, count


# -- saving ----------------------------------------------------------------------------------------------------------


class ErrorTensors:
    """The errors as tensors of a checkpoint.

    There are none in the middle of a step: its micro-batches, which are replayed, have changed the errors already.
    """

    def __init__(self, exchange: QuantizedSums, run: Run) -> None:
        """Collective over: all ranks."""
        self._exchange, self._run = exchange, run
        found = exchange.mesh.world.comm.gather_objects((run.pending_backwards, exchange.reducer.uses))
        self._uses = 0 if any(pending for pending, _ in found) else max(uses for _, uses in found)

    def mean(self, place: Place, slot: str) -> None:
        """None: optimizer states are the same on all data ranks."""

    def tensors(self, place: Place, shape: tuple[int, ...]) -> Iterator[LogicalTensor]:
        """The errors of one parameter, whose logical shape is `shape`; read as they are written."""
        feedback = self._exchange.feedback_of(place.unit) if self._uses else None
        if feedback is None:
            return
        for hop in self._exchange.hops(self._run, place.unit):
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
        made = self._run.layout.pieces(unit, entry.name, common.start - entry.offset, values, before=before)
        has_own_rows = _copies(self._run, unit)[1] > 1
        return tuple(replace(piece, is_replica=False) for piece in made) if has_own_rows else made

    def state(self) -> dict[str, Any]:
        """What the errors depend on, for the state tree; empty where none are saved."""
        if not self._uses:
            return {}
        return {KEY: {"uses": self._uses, "after": self._exchange.after, "loss_scale": self._run.loss_scale}}


# -- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sums:
    """A unit whose rows were saved at another layout: of each hop this rank's part of what every row becomes."""

    unit: Unit
    hops: tuple[_Hop, ...]
    parts: tuple[torch.Tensor, ...]


def read(exchange: QuantizedSums, loading: Loading) -> list[Sums]:
    """Read the errors of this rank; returns the sums of rows that are to be gathered. Local.

    Raises:
        CheckpointError: they are damaged.
    """
    source, layout = loading.source, loading.run.layout
    saved, names = loading.optimizer.get(KEY), set(source.names())
    stored = {name for name in names if {RANK_ERROR, NODE_ERROR}.intersection(source.slots(name))}
    if saved is None or not stored:
        level = logging.INFO if exchange.mesh.rank == 0 else logging.DEBUG
        log.log(level, "no errors of quantized gradients in %s: they begin at zero", source.path)
        return []
    uses, factor = _numbers(exchange, loading, saved)
    for name in names:
        _check_shapes(source, name)
    found = []
    for unit in exchange.table.units:
        feedback = exchange.feedback_of(unit)
        if feedback is None:
            continue
        hops, entries = exchange.hops(loading.run, unit), [e for e in unit.layout.entries if e.name in stored]
        feedback.uses = uses
        if _has_same_rows(source, hops, entries):
            for hop in hops:
                feedback.put(hop.name, hop.grid, _own_rows(source, layout, hop, entries, factor))
        else:
            found.append(_sums(exchange, source, layout, unit, hops, entries, factor))
    return found


def _spread(exchange: QuantizedSums, each: Sums) -> None:
    """Gather the parts of a unit's sums that ranks have read. Collective over: the data axis."""
    (inner, outer), feedback, padded = exchange.reducer.axes, exchange.feedback_of(each.unit), each.unit.layout.padded
    if feedback is None:
        return
    for hop, part in zip(each.hops, each.parts, strict=True):
        values = torch.empty(hop.span.numel)
        target = REPLICATED if hop.name == "first" else Placement((inner,))
        all_gather_into(exchange.mesh, values, part, Placement((inner, outer)), target, padded)
        feedback.put(hop.name, hop.grid, values)


def _numbers(exchange: QuantizedSums, loading: Loading, saved: Any) -> tuple[int, float]:
    """Sums since errors began, and the factor of errors, from the state tree.

    Raises:
        CheckpointError: they are impossible.
    """
    found: list[Any] = [saved.get(key) if isinstance(saved, Mapping) else None for key in _NUMBERS]
    uses, after, scale = found
    is_count = isinstance(uses, int) and not isinstance(uses, bool) and uses >= 0
    if not is_count or not all(isinstance(x, float) and math.isfinite(x) and x > 0 for x in (after, scale)):
        msg = (
            f"{KEY} in the state of {loading.source.path} are {saved!r}, expected a count and two positive numbers; "
            "the file is damaged: load with load_optimizer_states=False"
        )
        raise CheckpointError(msg)
    return uses, (after / exchange.after) * (loading.run.loss_scale / scale)


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


def _own_rows(source: Checkpoint, layout: Layout, hop: _Hop, entries: Iterable[Entry], factor: float) -> torch.Tensor:
    values = torch.zeros(hop.span.numel)
    for entry in entries:
        common = entry.span.intersect(hop.span)
        if common.numel:
            out = values[common.shifted(-hop.span.start).slice]
            layout.read(source, entry.name, hop.slot, common.start - entry.offset, out, row=hop.row)
    return _checked(source, values.mul_(factor), hop.slot, entries)


def _sums(
    exchange: QuantizedSums,
    source: Checkpoint,
    layout: Layout,
    unit: Unit,
    hops: list[_Hop],
    entries: Iterable[Entry],
    factor: float,
) -> Sums:
    """What each row becomes, on this rank's part of the unit. Errors of a hop that is not coded go to the other."""
    span, slots = (
        own_span(exchange.mesh, Placement(exchange.reducer.axes), unit.layout.padded),
        (RANK_ERROR, NODE_ERROR),
    )
    totals = {slot: torch.zeros(span.numel) for slot in slots}
    for entry in entries:
        common = entry.span.intersect(span)
        for slot in slots:
            out = totals[slot][common.shifted(-span.start).slice] if common.numel else totals[slot][:0]
            _read_total(source, layout, entry.name, slot, common.start - entry.offset, out)
    if len(hops) == 1:
        own = hops[0].slot
        totals[own] += totals[NODE_ERROR if own == RANK_ERROR else RANK_ERROR]
    made = (_checked(source, totals[hop.slot].mul_(factor / hop.rows), hop.slot, entries) for hop in hops)
    return Sums(unit, tuple(hops), tuple(made))


def _read_total(source: Checkpoint, layout: Layout, name: str, slot: str, start: int, out: torch.Tensor) -> None:
    """Fill `out` with the sum of all rows, added in order in fp64."""
    for first in range(0, out.numel(), _STEP):
        part = out[first : first + _STEP]
        values, total = torch.empty_like(part), torch.zeros(part.numel(), dtype=torch.float64)
        for row in range(_rows(source, name, slot)):
            layout.read(source, name, slot, start + first, values, row=row)
            total += values
        part.copy_(total)


def _checked(source: Checkpoint, values: torch.Tensor, slot: str, entries: Iterable[Entry]) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        names = ", ".join(entry.name for entry in entries)
        msg = f"{slot} of {names} in {source.path} is not finite; the file is damaged: load with "
        msg += "load_optimizer_states=False"
        raise CheckpointError(msg)
    return values
