"""What a checkpoint has of a 1-bit optimizer beside its slots: errors of coding, states of single ranks, numbers.

Errors of workers and states that differ between data ranks are one tensor with a row for each worker or rank, slots
`worker_error` and `local_...`. As many of them get their own rows back. Any other number gets the mean of the rows:
what is averaged next is linear in them, so it stays the same. Errors of servers belong to elements and not to ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.device import HOST
from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.logical import LogicalTensor
from mpispeed.optim.exchange import Drifts, Exchange
from mpispeed.optim.rule import KeepsNumbers, key_text
from mpispeed.store.move import own_share

if TYPE_CHECKING:
    from mpispeed.ckpt.load import Checkpoint
    from mpispeed.ckpt.logical import Piece
    from mpispeed.engine.parts import Parts
    from mpispeed.engine.whole import Whole
    from mpispeed.store.layout import Entry, Span
    from mpispeed.store.table import Place, Unit
    from mpispeed.zero.coded import CodedExchange

log = logging.getLogger(__name__)

WORKER_ERROR = "worker_error"
SERVER_ERROR = "server_error"

_STEP = 1 << 20
"""Elements of which a mean is made at once."""


def local_slot(slot: str) -> str:
    """Name of the tensor with a row for each data rank."""
    return f"local_{slot}"


# -- saving ----------------------------------------------------------------------------------------------------------


class CodedTensors:
    """The tensors that a 1-bit optimizer adds to a checkpoint.

    Where ranks are apart, ordinary slots hold the mean over data ranks of what differs.
    """

    def __init__(self, parts: Parts, whole: Whole, coded: CodedExchange) -> None:
        """Collective over: the data axis, where ranks are apart."""
        self._parts, self._whole, self._coded, self._comm = parts, whole, coded, parts.mesh["data"]
        self._local: tuple[str, ...] = ()
        self._means: dict[tuple[int, str], torch.Tensor] = {}
        self._shares: dict[int, Span] = {}
        rule = parts.optimization.rule if parts.optimization else None
        if isinstance(rule, Drifts) and coded.is_apart(parts.counters.update_count):
            self._local = rule.local_names
            for unit in parts.table.units:
                self._average(unit)

    @classmethod
    def of(cls, parts: Parts, whole: Whole) -> CodedTensors | None:
        """None for other optimizers. Collective over: the data axis, where ranks are apart."""
        coded = parts.optimization.coded if parts.optimization else None
        return None if coded is None else cls(parts, whole, coded)

    def _average(self, unit: Unit) -> None:
        share = self._shares[unit.index] = own_share(
            self._parts.mesh, self._parts.params.placement, unit.layout.padded, "data"
        )
        for slot in self._local:
            mean = self._cell(unit, slot).clone()
            self._comm.all_reduce(mean, "avg")
            self._means[unit.index, slot] = mean[share.slice].clone()

    def _cell(self, unit: Unit, slot: str) -> torch.Tensor:
        return self._parts.optimization.states.cells(unit)[slot].get()  # type: ignore[union-attr]

    def mean(self, place: Place, slot: str) -> tuple[Piece, ...] | None:
        """What this rank writes of a slot that differs between ranks; None for others."""
        values = self._means.get((place.unit.index, slot))
        if values is None:
            return None
        return self._pieces(place, self._shares[place.unit.index], values)

    def tensors(self, place: Place, shape: tuple[int, ...]) -> Iterator[LogicalTensor]:
        """All of one parameter, of the whole shape `shape`; errors once there are any."""
        unit, entry = place.unit, place.entry
        before = self._comm.rank * math.prod(shape)
        for slot in self._local:
            values = self._cell(unit, slot)
            pieces = self._pieces(place, unit.layout.whole, values, before)
            yield LogicalTensor(entry.name, local_slot(slot), (self._comm.size, *shape), values.dtype, pieces)
        errors, coder = self._coded.errors.get(unit.index), self._coded.coder
        if self._coded.is_pending:  # of a message that no parameter has seen; the batch is made again
            errors = None
        if errors is None:
            return
        worker, server = coder.spans(errors)
        pieces = self._pieces(place, worker, errors.worker, coder.worker * math.prod(shape))
        yield LogicalTensor(entry.name, WORKER_ERROR, (coder.workers, *shape), errors.worker.dtype, pieces)
        pieces = self._pieces(place, server, errors.server)
        yield LogicalTensor(entry.name, SERVER_ERROR, shape, errors.server.dtype, pieces)

    def _pieces(self, place: Place, span: Span, values: torch.Tensor, before: int = 0) -> tuple[Piece, ...]:
        """Those of one parameter among `values`, which are of the range `span` of its unit."""
        common, start = place.entry.span.intersect(span), place.entry.offset
        if not common.numel:
            return ()
        own = values[common.shifted(-span.start).slice].cpu()
        return self._whole.pieces(place.unit, place.entry.name, common.start - start, own, before=before)


def numbers_by_name(parts: Parts, whole: Whole) -> dict[str, dict[str, float]]:
    """Numbers that the rule keeps of each parameter of this stage.

    Of a cut parameter those of the first slice go by their names, those of others have the slice's number behind.

    Collective over: the model axis, for rules that keep any.
    """
    rule = parts.optimization.rule if parts.optimization else None
    if not isinstance(rule, KeepsNumbers):
        return {}
    rows = rule.scalars()
    own = {entry.name: dict(rows.get(key_text(key), {})) for key, entry in _windows(parts)}
    found: dict[str, dict[str, float]] = {}
    for rank, numbers in enumerate(parts.mesh["model"].gather_objects(own)):
        for name, row in numbers.items():
            if rank == 0 or name in whole.slices:
                found.setdefault(name, {}).update({key if rank == 0 else f"{key}.{rank}": x for key, x in row.items()})
    return found


def merge_nested(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Nested dicts as one; where several have a value, that of the first."""
    found: dict[str, Any] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, Mapping):
                found[key] = merge_nested([found.get(key, {}), value])
            else:
                found.setdefault(key, value)
    return found


def _windows(parts: Parts) -> Iterator[tuple[tuple[int, int, int], Entry]]:
    for unit in parts.table.units:
        for entry in unit.layout.entries:
            yield (unit.index, entry.group, entry.offset), entry


# -- loading ---------------------------------------------------------------------------------------------------------


def read_numbers(parts: Parts, source: Checkpoint, saved: Mapping[str, Any], whole: Whole) -> None:
    """Give the rule its scalars, as far as the checkpoint is of the same one; else it begins anew. Local."""
    rule = parts.optimization.rule if parts.optimization else None
    if rule is None:
        return
    is_same = saved["name"] == rule.name
    if not isinstance(rule, KeepsNumbers):
        rule.load_scalars(saved["scalars"]["by_window"] if is_same else {})
        return
    comm, stored, rows = parts.mesh["model"], set(source.names()), {}
    is_cut_alike = source.layout.get("model", 1) == comm.size
    for key, entry in _windows(parts):
        if not is_same or entry.name not in stored:
            continue
        numbers = source.info(entry.name).scalars
        suffix = f".{comm.rank}" if is_cut_alike and comm.rank and entry.name in whole.slices else ""
        rows[key_text(key)] = {
            name: numbers.get(name + suffix, numbers[name]) for name in rule.number_names if name in numbers
        }
    rule.load_scalars({key: row for key, row in rows.items() if row})


def read(parts: Parts, source: Checkpoint, saved: Mapping[str, Any], whole: Whole, seen: int) -> list[Unit]:
    """Errors of coding, and states of this rank alone, of an optimizer that has made `seen` updates. Local.

    Returns the units of which each rank has read a chunk, for `spread`.
    """
    coded = parts.optimization.coded if parts.optimization else None
    if coded is None or not seen:
        return []
    rule: Any = parts.optimization.rule  # type: ignore[union-attr]
    is_same = saved.get("name") == rule.name
    if is_same and saved.get("coded") != coded.subject(seen):
        _say(
            parts,
            logging.WARNING,
            f"{source.path} was saved in another phase of {rule.name}; errors, and local updates "
            "since ranks met, begin at zero",
        )
        if isinstance(rule, Drifts) and coded.subject(seen) != "drift":
            for unit in parts.table.units:
                parts.optimization.states.cells(unit)[rule.drift_name].clear()  # type: ignore[union-attr]
        return []
    if isinstance(rule, Drifts) and is_same and coded.is_apart(seen):
        for unit in parts.table.units:
            _read_local(parts, source, whole, unit, rule.local_names)
    found, cut = _read_all_errors(parts, coded, source, whole) if is_same else (0, [])
    was_coded = any(coded.kind(step) is not Exchange.GRADIENT for step in (seen, seen - 1))
    if not found and was_coded and parts.table.units:
        _say(parts, logging.INFO, f"no errors of 1-bit coding of {rule.name} in {source.path}: they begin at zero")
    return cut


def _check_shapes(source: Checkpoint, name: str) -> None:
    """Check the tensors that `CodedTensors` adds.

    Raises:
        CheckpointError: one is of a shape that it cannot have.
    """
    own, ranks = tuple(source.info(name).shape), math.prod(source.layout.get(axis, 1) for axis in ("pipe", "data"))
    for slot in source.slots(name):
        is_row = slot == WORKER_ERROR or slot.startswith(local_slot(""))
        if not is_row and slot != SERVER_ERROR:
            continue
        shape = tuple(source.stored(name, slot).shape)
        found = shape[1:] if is_row else shape
        if found != own or (is_row and not (shape and 1 <= shape[0] <= ranks)):
            wanted = f"(1 to {ranks}, then {own})" if is_row else f"{own}"
            msg = f"{name}/{slot} in {source.path} is of shape {shape}, expected {wanted}; the file is damaged"
            raise CheckpointError(msg)


def _read_all_errors(parts: Parts, coded: CodedExchange, source: Checkpoint, whole: Whole) -> tuple[int, list[Unit]]:
    """How many units have errors in the file, and those of which each rank has read a chunk.

    Raises:
        CheckpointError: they are damaged.
    """
    stored, found, cut = set(source.names()), 0, []
    for name in stored:
        _check_shapes(source, name)
    for unit in parts.table.units:
        entries = [e for e in unit.layout.entries if e.name in stored and WORKER_ERROR in source.slots(e.name)]
        if not entries:
            continue
        found += 1
        cut += [unit] if _read_errors(coded, source, whole, unit, entries) else []
        errors = coded.errors_of(unit)
        rows = {_rows(source, entry.name, WORKER_ERROR) for entry in entries}
        if len(rows) > 1 or not all(bool(torch.isfinite(x).all()) for x in (errors.worker, errors.server)):
            msg = (
                f"errors of 1-bit coding around {entries[0].name!r} in {source.path} are of {sorted(rows)} workers, or "
            )
            msg += "not finite; the file is damaged: load with load_optimizer_states=False"
            raise CheckpointError(msg)
    return found, cut


def spread(parts: Parts, units: Iterable[Unit]) -> None:
    """Bring the chunks together that ranks have read. Collective over: the data axis."""
    coded = parts.optimization.coded if parts.optimization else None
    if coded is not None:
        for unit in units:
            coded.coder.collect(coded.errors_of(unit))


def _say(parts: Parts, level: int, text: str) -> None:
    log.log(level if parts.mesh.rank == 0 else logging.DEBUG, "%s", text)


def _read_local(parts: Parts, source: Checkpoint, whole: Whole, unit: Unit, slots: Iterable[str]) -> None:
    """This rank's own rows; at another number of ranks the means in the ordinary slots stay, which were read before."""
    comm, stored = parts.mesh["data"], set(source.names())
    for slot in slots:
        cell = parts.optimization.states.cells(unit)[slot]  # type: ignore[union-attr]
        values = cell.get()
        for entry in unit.layout.entries:
            if entry.name in stored and _rows(source, entry.name, local_slot(slot)) == comm.size:
                whole.read(source, entry.name, local_slot(slot), 0, values[entry.span.slice], row=comm.rank)
        cell.put(values)


def _rows(source: Checkpoint, name: str, slot: str) -> int:
    """How many ranks have a row in it; 0 if there is no such tensor."""
    return source.stored(name, slot).shape[0] if slot in source.slots(name) else 0


def _read_errors(coded: CodedExchange, source: Checkpoint, whole: Whole, unit: Unit, entries: Iterable[Entry]) -> bool:
    """True if errors of the worker are read only where this rank has those of the server."""
    errors, coder, is_cut = coded.errors_of(unit), coded.coder, False
    worker, server = coder.spans(errors)
    for entry in entries:
        rows, own, chunk = _rows(source, entry.name, WORKER_ERROR), *map(entry.span.intersect, (worker, server))
        if rows == coder.workers and own.numel:
            out = errors.worker[own.shifted(-worker.start).slice]
            whole.read(source, entry.name, WORKER_ERROR, own.start - entry.offset, out, row=coder.worker)
        if rows != coder.workers:
            is_cut = True
            out = errors.worker[chunk.shifted(-worker.start).slice] if chunk.numel else errors.worker[:0]
            _read_mean(source, whole, entry.name, rows, chunk.start - entry.offset, out)
        if chunk.numel:
            out = errors.server[chunk.shifted(-server.start).slice]
            whole.read(source, entry.name, SERVER_ERROR, chunk.start - entry.offset, out)
    return is_cut


def _read_mean(source: Checkpoint, whole: Whole, name: str, rows: int, start: int, out: torch.Tensor) -> None:
    for first in range(0, out.numel(), _STEP):
        part = out[first : first + _STEP]
        row_values, total = torch.empty_like(part, device=HOST), torch.zeros(part.numel(), dtype=torch.float64)
        for row in range(rows):
            whole.read(source, name, WORKER_ERROR, start + first, row_values, row=row)
            total += row_values
        part.copy_(total / rows)
