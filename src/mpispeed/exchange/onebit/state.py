"""Checkpoint state of a 1-bit optimizer beside its slots: exchange errors, states of single ranks, scalars.

Worker errors and states that differ between data ranks are tensors with a row for each worker or rank, in the slots
`worker_error` and `local_...`. The same number of workers gets its own rows back, any other number the mean of the
rows: the next average is linear in them, so it stays the same. Server errors belong to elements and not to ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.device import HOST
from mpispeed.base.errors import CheckpointError, StoreError
from mpispeed.ckpt.format.logical import LogicalTensor
from mpispeed.exchange.saved import NAMES_SHOWN
from mpispeed.optim.exchange import Drifts, Exchange
from mpispeed.store.transfers import own_share

if TYPE_CHECKING:
    from mpispeed.ckpt.format.logical import Piece
    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.exchange.onebit.updates import OneBitUpdates
    from mpispeed.exchange.saved import Layout, Loading
    from mpispeed.store.layout import Entry, Place, Span, Unit

log = logging.getLogger(__name__)

WORKER_ERROR = "worker_error"
SERVER_ERROR = "server_error"

_STEP = 1 << 20
"""Elements averaged at once."""


def local_slot(slot: str) -> str:
    """Slot of the tensor with a row for each data rank."""
    return f"local_{slot}"


# -- saving ----------------------------------------------------------------------------------------------------------


class CodedTensors:
    """The tensors that a 1-bit optimizer adds to a checkpoint.

    Where states differ between data ranks, ordinary slots hold their mean.
    """

    def __init__(self, onebit: OneBitUpdates, layout: Layout) -> None:
        """Collective over: the data axis, where states differ between its ranks."""
        self._layout, self._onebit, self._comm = layout, onebit, onebit.mesh["data"]
        self._local: tuple[str, ...] = ()
        self._means: dict[tuple[int, str], torch.Tensor] = {}
        self._shares: dict[int, Span] = {}
        if isinstance(onebit.rule, Drifts) and onebit.is_apart:
            self._local = onebit.rule.local_names
            for unit in onebit.params.table.units:
                self._average(unit)

    def state(self) -> dict[str, Any]:
        """The quantity that errors are of, for the state tree."""
        return {"coded": self._onebit.subject(self._onebit.step - 1)}

    def _average(self, unit: Unit) -> None:
        states = unit.states
        share = own_share(self._onebit.mesh, states.master, unit.layout.padded, states.partial)
        self._shares[unit.index] = share
        with self._comm.together(StoreError):
            values = {slot: self._holder(unit, slot) for slot in self._local}
        for slot in self._local:
            mean = values[slot].clone()
            self._comm.all_reduce(mean, "avg")
            self._means[unit.index, slot] = mean[share.slice].clone()

    def _holder(self, unit: Unit, slot: str) -> torch.Tensor:
        return self._onebit.states.tensors(unit)[slot].get()

    def mean(self, place: Place, slot: str) -> tuple[Piece, ...] | None:
        """This rank's pieces of the mean of a slot that differs between ranks; None for others."""
        values = self._means.get((place.unit.index, slot))
        if values is None:
            return None
        return self._pieces(place, self._shares[place.unit.index], values)

    def tensors(self, place: Place, shape: tuple[int, ...]) -> Iterator[LogicalTensor]:
        """Additional tensors of one parameter, whose logical shape is `shape`; errors once there are any."""
        unit, entry = place.unit, place.entry
        before = self._comm.rank * math.prod(shape)
        for slot in self._local:
            values = self._holder(unit, slot)
            pieces = self._pieces(place, unit.layout.whole, values, before)
            yield LogicalTensor(entry.name, local_slot(slot), (self._comm.size, *shape), values.dtype, pieces)
        errors, compressor = self._onebit.coder.errors.get(unit.index), self._onebit.coder.compressor
        if self._onebit.gradients.is_pending:  # errors of an exchange that no update has used; the batch is replayed
            errors = None
        if errors is None:
            return
        worker, server = compressor.spans(errors)
        pieces = self._pieces(place, worker, errors.worker, compressor.worker * math.prod(shape))
        yield LogicalTensor(entry.name, WORKER_ERROR, (compressor.workers, *shape), errors.worker.dtype, pieces)
        pieces = self._pieces(place, server, errors.server)
        yield LogicalTensor(entry.name, SERVER_ERROR, shape, errors.server.dtype, pieces)

    def _pieces(self, place: Place, span: Span, values: torch.Tensor, before: int = 0) -> tuple[Piece, ...]:
        """Pieces of one parameter in `values`, which cover the range `span` of its unit."""
        common, start = place.entry.span.intersect(span), place.entry.offset
        if not common.numel:
            return ()
        own = values[common.shifted(-span.start).slice].cpu()
        return self._layout.pieces(place.unit, place.entry.name, common.start - start, own, before=before)


def merge_nested(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge nested dicts; the first value of a key counts."""
    found: dict[str, Any] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, Mapping):
                found[key] = merge_nested([found.get(key, {}), value])
            else:
                found.setdefault(key, value)
    return found


# -- loading ---------------------------------------------------------------------------------------------------------


def read(onebit: OneBitUpdates, loading: Loading) -> list[Unit]:
    """Read exchange errors and states of this rank. Local.

    Returns the units whose worker errors each rank has read for its chunk only.
    """
    seen, source, layout, rule = loading.seen, loading.source, loading.run.layout, onebit.rule
    if not seen:
        return []
    is_same = loading.optimizer.get("name") == rule.name
    if is_same and loading.optimizer.get("coded") != onebit.subject(seen):
        _say(
            onebit,
            logging.WARNING,
            f"{source.path} was saved in another phase of {rule.name}; errors, and local updates "
            "since ranks met, begin at zero",
        )
        if isinstance(rule, Drifts) and onebit.subject(seen) != "drift":
            for unit in onebit.params.table.units:
                onebit.states.tensors(unit)[rule.drift_name].clear()
        return []
    if isinstance(rule, Drifts) and is_same and onebit.is_apart_after(seen):
        for unit in onebit.params.table.units:
            _read_local(onebit, source, layout, unit, rule.local_names)
    found, cut = _read_all_errors(onebit, source, layout) if is_same else (0, [])
    was_coded = any(onebit.kind(step) is not Exchange.GRADIENT for step in (seen, seen - 1))
    if not found and was_coded and onebit.params.table.units:
        _say(onebit, logging.INFO, f"no errors of 1-bit coding of {rule.name} in {source.path}: they begin at zero")
    return cut


def _check_shapes(source: Checkpoint, name: str) -> None:
    """Check the tensors that `CodedTensors` adds.

    Raises:
        CheckpointError: one has an impossible shape.
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


def _read_all_errors(onebit: OneBitUpdates, source: Checkpoint, layout: Layout) -> tuple[int, list[Unit]]:
    """Read errors of all units; return the number of units that have any, and those read for a chunk only.

    Raises:
        CheckpointError: they are damaged.
    """
    stored, found, cut = set(source.names()), 0, []
    for name in stored:
        _check_shapes(source, name)
    for unit in onebit.params.table.units:
        entries = [e for e in unit.layout.entries if e.name in stored and WORKER_ERROR in source.slots(e.name)]
        if not entries:
            continue
        found += 1
        cut += [unit] if _read_errors(onebit, source, layout, unit, entries) else []
        errors = onebit.coder.errors_of(unit)
        rows = {_rows(source, entry.name, WORKER_ERROR) for entry in entries}
        if len(rows) > 1 or not all(bool(torch.isfinite(x).all()) for x in (errors.worker, errors.server)):
            msg = (
                f"errors of 1-bit coding around {entries[0].name!r} in {source.path} are of {sorted(rows)} workers, or "
            )
            msg += "not finite; the file is damaged: load with load_optimizer_states=False"
            raise CheckpointError(msg)
    return found, cut


def _say(onebit: OneBitUpdates, level: int, text: str) -> None:
    log.log(level if onebit.mesh.rank == 0 else logging.DEBUG, "%s", text)


def _read_local(onebit: OneBitUpdates, source: Checkpoint, layout: Layout, unit: Unit, slots: Iterable[str]) -> None:
    """Read this rank's own rows; for another number of ranks the means, which were read before, stay."""
    comm, stored = onebit.mesh["data"], set(source.names())
    for slot in slots:
        holder = onebit.states.tensors(unit)[slot]
        values = holder.get()
        for entry in unit.layout.entries:
            if entry.name in stored and _rows(source, entry.name, local_slot(slot)) == comm.size:
                layout.read(source, entry.name, local_slot(slot), 0, values[entry.span.slice], row=comm.rank)
        holder.put(values)


def _rows(source: Checkpoint, name: str, slot: str) -> int:
    """Number of rows of a tensor; 0 if there is no such tensor."""
    return source.stored(name, slot).shape[0] if slot in source.slots(name) else 0


def _read_errors(
    onebit: OneBitUpdates, source: Checkpoint, layout: Layout, unit: Unit, entries: Iterable[Entry]
) -> bool:
    """Read a unit's errors; True if worker errors were read only for this rank's chunk of server errors."""
    errors, compressor, is_cut = onebit.coder.errors_of(unit), onebit.coder.compressor, False
    worker, server = compressor.spans(errors)
    for entry in entries:
        rows, own, chunk = _rows(source, entry.name, WORKER_ERROR), *map(entry.span.intersect, (worker, server))
        if rows == compressor.workers and own.numel:
            out = errors.worker[own.shifted(-worker.start).slice]
            layout.read(source, entry.name, WORKER_ERROR, own.start - entry.offset, out, row=compressor.worker)
        if rows != compressor.workers:
            is_cut = True
            out = errors.worker[chunk.shifted(-worker.start).slice] if chunk.numel else errors.worker[:0]
            _read_mean(source, layout, entry.name, rows, chunk.start - entry.offset, out)
        if chunk.numel:
            out = errors.server[chunk.shifted(-server.start).slice]
            layout.read(source, entry.name, SERVER_ERROR, chunk.start - entry.offset, out)
    return is_cut


def _read_mean(source: Checkpoint, layout: Layout, name: str, rows: int, start: int, out: torch.Tensor) -> None:
    for first in range(0, out.numel(), _STEP):
        part = out[first : first + _STEP]
        row_values, total = torch.empty_like(part, device=HOST), torch.zeros(part.numel(), dtype=torch.float64)
        for row in range(rows):
            layout.read(source, name, WORKER_ERROR, start + first, row_values, row=row)
            total += row_values
        part.copy_(total / rows)


def refuse_still(onebit: OneBitUpdates, loading: Loading, fresh: Collection[str]) -> None:
    """Refuse parameters without a variance that a 1-bit optimizer has frozen: they would never move.

    Raises:
        CheckpointError: there are such parameters.
    """
    rule, source = onebit.rule, loading.source
    if not set(rule.state_names) <= set(loading.optimizer.get("slots", ())):
        return
    step = max((source.info(name).step for name in source.names()), default=0) + 1
    places = {name: onebit.params.table.by_name(name) for name in fresh}
    groups = {name: onebit.groups[place.entry.group] for name, place in places.items() if place is not None}
    still = sorted(name for name, group in groups.items() if rule.exchanges(step, group) is not Exchange.GRADIENT)
    if still:
        msg = (
            f"optimizer state of {', '.join(still[:NAMES_SHOWN])} is not in {source.path}, and the warm-up of "
            f"{rule.name} is over: without a variance they would never move. Load with load_optimizer_states=False to "
            'begin a warm-up, or give them a group with "non_freeze": true (OneBitAdam)'
        )
        raise CheckpointError(msg)
