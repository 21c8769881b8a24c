"""Reads a run record that somebody else wrote, maybe a moment ago, maybe with intent.

HDF5 tells names, types and places only; elements are read from the file by position, after their number was compared
with the size of the file. Nothing outside of the file is opened, no filter is loaded, and what is shown has a checksum.
A record that is being written is as good as another: it has all that was flushed.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5a, h5f, h5g

from mpispeed.base.plain import printable
from mpispeed.ckpt.format import hdf5, kinds
from mpispeed.native.checksum import crc32c
from mpispeed.record import layout
from mpispeed.record.errors import NoRecord, RecordError
from mpispeed.record.series import Points, SeriesInfo, SeriesTable

log = logging.getLogger(__name__)

_MAGIC = b"\x89HDF\r\n\x1a\n"
_MOST_BYTES: Mapping[str, int] = {"rows": 4 << 30, "names": 64 << 20, "notes": 256 << 20, "spans": 4 << 30}
"""Of tables; larger ones are refused, since all of it is read."""
_MOST_FACTS = 64
_MOST_LOST_SIGNS = 2000
_MOST_DEPTH = 60
"""Of lists and objects of JSON, one in the other."""
_AGAIN_SECONDS = 0.05
"""After so long a slot that was read while it was written is read again."""
_FAULTS = (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError, OverflowError, MemoryError)
"""What HDF5 and numpy raise for files that are not what they say."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A dataset with one dim whose elements lie one after the other in the file, `offset` bytes from its start."""

    name: str
    offset: int
    capacity: int
    dtype: np.dtype


class Record:
    """Contents of one file, all of which is read when it is opened.

    Attributes:
        path: of the file.
        run: id of the run.
        started: Unix seconds.
        host: name of the node that wrote the file, "" if it does not say so.
        facts: values of JSON by name, as known when the run started.
        names: of series and spans; numbers in rows and spans are places in it.
        rows: of the dtype `layout.ROW`, in the order in which they were written.
        is_ended: the writer has closed the file.
        lost: what is missing or damaged, in one sentence; None if nothing is.
    """

    def __init__(
        self,
        path: Path,
        attributes: Mapping[str, Any],
        facts: Mapping[str, Any],
        tables: Mapping[str, np.ndarray],
        state: layout.State,
        problems: list[str],
    ) -> None:
        self.path, self.facts = path, dict(facts)
        self.run, self.host = _text(attributes, "run"), _text(attributes, "host")
        self.started = _number(attributes, "started")
        self.names = _names(tables["names"])
        self.rows, self._spans = tables["rows"], tables["spans"]
        self._table = SeriesTable(self.names, self.rows)
        for field in ("name", "lane"):
            if len(self._spans) and int(self._spans[field].max()) >= len(self.names):
                msg = f"a span has the {field} {self._spans[field].max()}, and there are {len(self.names)} names"
                raise ValueError(msg)
        if not all(np.isfinite(self._spans[field]).all() for field in ("begin", "end")):
            msg = "a span has no time that is a number"
            raise ValueError(msg)
        self._notes = _notes(tables["notes"])
        self.is_ended = state.is_ended
        if state.dropped:
            problems = [*problems, f"{state.dropped} points were dropped, since the file system was too slow"]
        self.lost = printable("; ".join(problems), _MOST_LOST_SIGNS) or None

    def series(self) -> list[SeriesInfo]:
        """All series that have points."""
        return self._table.series()

    def points(self, name: str, rank: int = 0) -> Points:
        """The points of one series on one rank. Raises KeyError as `SeriesTable.points`."""
        return self._table.points(name, rank)

    def notes(self) -> list[dict[str, Any]]:
        """What happened, in this order; each has "time" (Unix seconds) and "kind"."""
        return [dict(note) for note in self._notes]

    def spans(self) -> np.ndarray:
        """What ran when, of the dtype `layout.SPAN`; names and lanes are places in `names`."""
        return self._spans


def open_record(path: Path) -> Record:
    """Read a run record.

    Raises:
        NoRecord: there is no file, or it is no run record.
        RecordError: it is damaged beyond what its checksums prove, or of a later version.
    """
    try:
        with _opened(path) as (handle, size, file):
            return _read(path, handle, size, file)
    except RecordError:
        raise
    except _FAULTS as failure:
        msg = f"{path} cannot be read as a run record: {_said(failure)}"
        raise RecordError(msg) from failure


def is_record(path: Path) -> bool:
    """True if a file says that it is a run record; what it has is not looked at."""
    try:
        with _opened(path) as (_, _, file):
            return _format(file.id) == layout.FORMAT
    except (RecordError, *_FAULTS):
        return False


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Handle, size in bytes and HDF5's view of an ordinary file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failure:
        msg = f"{path} is no run record that can be read: {failure.strerror}"
        raise NoRecord(msg) from failure
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            msg = f"{path} is no ordinary file and so no run record"
            raise NoRecord(msg)
        if os.pread(handle, len(_MAGIC), 0) != _MAGIC:
            msg = f"{path} is {'empty' if not status.st_size else 'no HDF5 file'} and so no run record"
            raise NoRecord(msg)
        # through the same handle, as a writer may put a larger file in the place of this one
        with hdf5.open_reading(io.FileIO(handle, closefd=False)) as file:
            yield handle, status.st_size, file
    finally:
        os.close(handle)


def _format(root: h5f.FileID) -> str:
    """The attribute `format` of a file, "" if it has none that is a short text."""
    if not h5a.exists(root, b"format"):
        return ""
    kind = h5a.open(root, b"format").get_type()
    is_short = not getattr(kind, "is_variable_str", lambda: True)() and kind.get_size() <= 1024
    return hdf5.text(hdf5.attributes(root)["format"]) if is_short else ""


def _read(path: Path, handle: int, size: int, file: Any) -> Record:
    form = _format(file.id)
    if form != layout.FORMAT:
        what = f"its format is {form!r:.60}" if form else "it does not say what it is"
        msg = f"{path} is an HDF5 file, but no run record: {what}"
        raise NoRecord(msg)
    attributes = hdf5.attributes(file.id)
    version, known = kinds.version_of(attributes), (layout.VERSION, 0)
    if why := kinds.refusal(version, known):
        msg = f"{path} is a run record {why}"
        raise RecordError(msg)
    if version and (said := kinds.warning(version, known)):
        log.warning("%s is a run record %s", path, said)
    plan = file.id.get_create_plist()
    if plan.get_userblock() or plan.get_sizes() != (8, 8):
        msg = "it has a user block or addresses of another size than 8 bytes"
        raise ValueError(msg)
    root: h5g.GroupID = file["/"].id
    places = {name: _place(root, name, dtype, size) for name, dtype in layout.TABLES.items()}
    place = _place(root, layout.STATE, layout.SLOT, size)
    facts, problems = _facts(root, handle, size)
    state, tables, missing = _proven(handle, places, place)
    return Record(path, attributes, facts, tables, state, [*missing, *problems])


def _place(parent: h5g.GroupID, name: str, dtype: np.dtype, size: int) -> _Table:
    """Where a dataset of this name and type lies. Raises as `open_record`, without the path."""
    offset, count, _ = hdf5.contiguous_place(parent, name, (dtype,), size)
    return _Table(name, offset, count, dtype)


def _elements(handle: int, table: _Table, count: int) -> np.ndarray:
    """The first elements of a table; `count` is checked already."""
    found = np.empty(count, table.dtype)
    if not count:
        return found
    raw: Any = found.view(np.uint8)
    view, done = memoryview(raw), 0
    while done < len(view):
        part = os.preadv(handle, [view[done : done + (1 << 30)]], table.offset + done)
        if not part:
            msg = f"the file ends inside of /{table.name}"
            raise ValueError(msg)
        done += part
    return found


def _proven(
    handle: int, places: Mapping[str, _Table], place: _Table
) -> tuple[layout.State, dict[str, np.ndarray], list[str]]:
    """The newest state that its own checksum and those of the tables prove, the tables, and what is lost."""
    states, problems = _states(handle, place)
    if not states:
        if problems:
            msg = f"no slot of /{layout.STATE} is valid, so nothing in the file is proven"
            raise ValueError(msg)
        return layout.State(), {name: np.empty(0, table.dtype) for name, table in places.items()}, []
    for state in states:
        tables, faults = _tables(handle, places, state)
        if not faults:
            return state, tables, problems
        problems += [f"{fault} (flush {state.sequence})" for fault in faults]
    msg = f"its tables are damaged: {'; '.join(problems)}"
    raise ValueError(msg)


def _states(handle: int, place: _Table) -> tuple[list[layout.State], list[str]]:
    """The valid states, the newest first, and a sentence for each slot that is neither valid nor unused."""
    if place.capacity < layout.SLOTS:
        msg = f"/{layout.STATE} has {place.capacity} slots; expected {layout.SLOTS}"
        raise ValueError(msg)
    for attempt in range(3):
        if attempt:
            time.sleep(_AGAIN_SECONDS)
        slots = _elements(handle, place, layout.SLOTS)
        found = [layout.latest_state(slot.tobytes()) for slot in slots]
        broken = [number for number, slot in enumerate(slots) if found[number] is None and any(slot.tobytes())]
        if not broken:
            break
    states = sorted((state for state in found if state is not None), key=lambda state: -state.sequence)
    return states, [f"slot {number} of /{layout.STATE} is damaged: the last flush may be missing" for number in broken]


def _tables(handle: int, places: Mapping[str, _Table], state: layout.State) -> tuple[dict[str, np.ndarray], list[str]]:
    """The elements that a state proves, and a sentence for each table that does not fit it."""
    tables, faults = {}, []
    for name, table in places.items():
        count = state.counts[name]
        if count > table.capacity:
            faults.append(f"/{name} should have {count} elements and has room for {table.capacity}")
            continue
        if count * table.dtype.itemsize > _MOST_BYTES[name]:
            faults.append(f"/{name} has {count} elements, more than are read")
            continue
        tables[name] = _elements(handle, table, count)
        if crc32c(tables[name].view(np.uint8) if count else b"") != state.checksums[name]:
            faults.append(f"the {count} elements of /{name} do not have their checksum")
    return tables, faults


def _facts(root: h5g.GroupID, handle: int, size: int) -> tuple[dict[str, Any], list[str]]:
    """The facts, and a sentence for each that is damaged."""
    group = hdf5.hard_child(root, layout.FACTS)
    if not isinstance(group, h5g.GroupID) or group.get_num_objs() > _MOST_FACTS:
        msg = f"/{layout.FACTS} is no group of at most {_MOST_FACTS} facts"
        raise ValueError(msg)
    facts: dict[str, Any] = {}
    problems = []
    for name in hdf5.names(group):
        try:
            facts[name] = _fact(group, name, handle, size)
        except _FAULTS as failure:
            problems.append(f"/{layout.FACTS}/{name} is damaged: {_said(failure)}")
    return facts, problems


def _fact(group: h5g.GroupID, name: str, handle: int, size: int) -> Any:
    table = _place(group, name, np.dtype("u1"), size)
    if table.capacity > layout.MOST_FACT_BYTES:
        msg = f"it has {table.capacity} bytes, more than {layout.MOST_FACT_BYTES}"
        raise ValueError(msg)
    raw = _elements(handle, table, table.capacity).tobytes()
    if hdf5.attributes(hdf5.hard_child(group, name))[layout.FACT_CHECKSUM] != crc32c(raw):
        msg = "it does not have its checksum"
        raise ValueError(msg)
    return _plain(raw)


def _plain(raw: bytes) -> Any:
    """The value of a text of JSON. Raises ValueError if it is none, or nested too deep."""
    value = json.loads(raw.decode())
    level, depth = [value], 0
    while level := [
        inner
        for outer in level
        if isinstance(outer, (dict, list))
        for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]:
        depth += 1
        if depth > _MOST_DEPTH:
            msg = f"it has more than {_MOST_DEPTH} lists and objects one in the other"
            raise ValueError(msg)
    return value


def _names(raw: np.ndarray) -> tuple[str, ...]:
    text = raw.tobytes().decode()
    if text and not text.endswith("\n"):
        msg = "/names ends inside of a name"
        raise ValueError(msg)
    return tuple(text.split("\n")[:-1])


def _notes(raw: np.ndarray) -> list[dict[str, Any]]:
    notes = []
    for number, line in enumerate(raw.tobytes().split(b"\n")):
        if not line:
            continue
        note = _plain(line)
        if not isinstance(note, dict) or not isinstance(note.get("kind"), str) or not _is_time(note.get("time")):
            msg = f"line {number + 1} of /notes is no note with a kind and a time"
            raise ValueError(msg)
        notes.append(note)
    return notes


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _text(attributes: Mapping[str, Any], name: str) -> str:
    return hdf5.text(attributes[name]) if name in attributes else ""


def _number(attributes: Mapping[str, Any], name: str) -> float:
    value = attributes[name]
    if not isinstance(value, (np.floating, np.integer)):
        msg = f"its attribute {name!r} is {value!r:.60}; expected a number"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return float(value)


def _said(failure: BaseException) -> str:
    text = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure
    return printable(str(text) or type(failure).__name__, 300)
