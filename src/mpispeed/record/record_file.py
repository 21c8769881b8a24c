"""One run record on disk: made under a name of its own, appended to by plain writes, replaced when it is full.

A full table has a successor: a larger file beside the record, to which what is there is copied a piece at a time, and
which then takes the record's name. A kill leaves the one or the other under that name, never something between.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.ckpt.format.sparse_image import write_at
from mpispeed.native.checksum import crc32c
from mpispeed.record.layout import FILE_MODE, SLOT, STATE, SUFFIX, TABLES, Places, State, lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Copied at a time to a successor; what has come meanwhile is written in between."""
RETRY_SECONDS = 60.0
"""A successor that could not be made is tried again after so long."""
OLD_SECONDS = 86400.0
"""Unfinished files of so long ago belong to nobody any more."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_MOST_FILES = 100_000


def choose_path(wish: Path) -> Path:
    """The first free name for a record: `wish` itself if it ends in .h5, or run.h5 in that folder; then with -2, -3.

    Raises:
        OSError: there are very many already.
    """
    first = wish if wish.suffix == SUFFIX else wish / f"run{SUFFIX}"
    if not os.path.lexists(first):
        return first
    for number in range(2, _MOST_FILES):
        path = first.with_name(f"{first.stem}-{number}{SUFFIX}")
        if not os.path.lexists(path):
            return path
    raise OSError(errno.EEXIST, f"{_MOST_FILES} run records are there already", str(first))


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a record has from its start: attributes and facts (JSON texts)."""

    attributes: Mapping[str, Any]
    facts: Mapping[str, bytes]


@dataclass(slots=True)
class _Laid:
    """A file that was laid out, and where it has been written to."""

    path: Path
    places: Places
    handle: int

    @classmethod
    def make(cls, path: Path, contents: Contents, capacity: Mapping[str, int]) -> _Laid:
        """Lay out a file, which replaces an unfinished one of that name.

        Raises:
            OSError: as `lay_out`; nothing is left.
        """
        path.unlink(missing_ok=True)
        try:
            places = lay_out(path, contents.attributes, contents.facts, capacity)
            return cls(path, places, os.open(path, os.O_RDWR))
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def read(self, table: str, first: int, count: int) -> bytes:
        """So many elements of a table."""
        size, parts = TABLES[table].itemsize, list[bytes]()
        place, left = self.places.offsets[table] + first * size, count * size
        while left:
            part = os.pread(self.handle, left, place)
            if not part:
                raise OSError(errno.EIO, f"the record ends within its table {table!r}", str(self.path))
            parts.append(part)
            place, left = place + len(part), left - len(part)
        return b"".join(parts)

    def write(self, table: str, first: int, data: bytes) -> None:
        """Put elements of a table into their place."""
        write_at(self.handle, memoryview(data), self.places.offsets[table] + first * TABLES[table].itemsize)

    def put_state(self, state: State) -> None:
        """Write the slot of a state; the other slot stays."""
        place = self.places.offsets[STATE] + state.place * SLOT.itemsize
        write_at(self.handle, memoryview(state.packed()), place)

    def drop(self) -> None:
        """Let go of the file and remove it."""
        with suppress(OSError):
            os.close(self.handle)
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


@dataclass(slots=True)
class _Successor:
    """A larger file on its way, and how much of each table it has."""

    file: _Laid
    copied: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))

    def copy_piece(self, old: _Laid, state: State) -> bool:
        """Copy the next piece; False if nothing is left to copy."""
        for table, kind in TABLES.items():
            first = self.copied[table]
            count = min(state.counts[table] - first, PIECE_BYTES // kind.itemsize)
            if count:
                self.file.write(table, first, old.read(table, first, count))
                self.copied[table] = first + count
                return True
        return False

    def holds(self, needed: Mapping[str, int]) -> bool:
        """True if its tables have room for so many elements."""
        return all(self.file.places.capacity[table] >= count for table, count in needed.items())


class RecordFile:
    """A new record. Methods are called by one thread at a time and may take as long as the file system does.

    Attributes:
        path: of the file.
        state: of the last flush.
    """

    def __init__(self, wish: Path, contents: Contents, capacity: Mapping[str, int]) -> None:
        """Make the record.

        Args:
            wish: a folder, made if it is missing, or a name that ends in .h5; a number is added if it is taken.
            contents: attributes and facts.
            capacity: elements of each table.

        Raises:
            OSError: it cannot be made.
        """
        folder = wish.parent if wish.suffix == SUFFIX else wish
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old(folder)
        self._contents = contents
        unique = f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}"
        file = _Laid.make(folder / f".run-{unique}.unfinished", contents, capacity)
        try:
            self.path = _publish(file.path, wish)
        except BaseException:
            file.drop()
            raise
        file.path = self.path
        self._file, self._successor = file, None  # type: _Laid, _Successor | None
        self.state = State()
        self._may_grow_at = -float("inf")
        self.growth_failure: OSError | None = None

    @property
    def capacity(self) -> Mapping[str, int]:
        """Elements of each table of the present file."""
        return self._file.places.capacity

    def append(self, parts: Mapping[str, bytes], *, dropped: int = 0, is_ended: bool = False) -> None:
        """Write elements of tables, and then the state that proves them.

        After an error nothing has changed, and the same may be tried again.

        Args:
            parts: bytes of whole elements by table.
            dropped: rows that have been lost so far.
            is_ended: this is the last call.

        Raises:
            OSError: the file system refuses, or a table is full and cannot grow.
        """
        counts, checksums = dict(self.state.counts), dict(self.state.checksums)
        for table, data in parts.items():
            counts[table] += len(data) // TABLES[table].itemsize
            checksums[table] = crc32c(data, checksums[table])
        if any(counts[table] > self.capacity[table] for table in counts):
            self._grow_now(counts)
        for table in TABLES:
            if parts.get(table):
                self._file.write(table, self.state.counts[table], parts[table])
        self._prove(State(self.state.sequence + 1, counts, checksums, dropped, is_ended))
        if any(4 * count > 3 * self.capacity[table] for table, count in counts.items()):
            self._begin_successor(counts)

    def _prove(self, state: State) -> None:
        self._file.put_state(state)
        self.state = state

    # -- successors ----------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Copy another piece to a successor; True while there is more to do. A failure ends the successor only."""
        if self._successor is None:
            return False
        try:
            if self._successor.copy_piece(self._file, self.state):
                return True
            self._replace()
        except OSError as error:
            self._give_up(error)
        return False

    def _begin_successor(self, needed: Mapping[str, int]) -> None:
        if self._successor is not None or time.monotonic() < self._may_grow_at:
            return
        capacity = {table: _grown(self.capacity[table], count) for table, count in needed.items()}
        try:
            path = self.path.with_name(f".{self.path.name}.successor")
            self._successor = _Successor(_Laid.make(path, self._contents, capacity))
        except OSError as error:
            self._give_up(error)

    def _grow_now(self, needed: Mapping[str, int]) -> None:
        """Bring a successor to its end that has room for so many elements."""
        if self._successor is not None and not self._successor.holds(needed):
            self._successor.file.drop()
            self._successor = None
        self._begin_successor(needed)
        while self.advance():
            pass
        if any(count > self.capacity[table] for table, count in needed.items()):
            why = self.growth_failure
            text = "it is full and cannot be made larger" + (f": {why.strerror}" if why is not None else "")
            raise OSError(errno.ENOSPC if why is None else why.errno, text, str(self.path))

    def _replace(self) -> None:
        """Let the successor, which has everything, take the name."""
        found = self._successor
        if found is None:
            return
        if os.path.lexists(self.path) and not self.is_in_place():
            raise OSError(errno.EEXIST, "another file has its name by now", str(self.path))
        state = replace(self.state, sequence=self.state.sequence + 1)
        found.file.put_state(state)
        os.fsync(found.file.handle)  # the name must not come to a file whose bytes a node takes down with it
        found.file.path.replace(self.path)
        os.close(self._file.handle)
        found.file.path = self.path
        self._file, self._successor, self.state = found.file, None, state
        self.growth_failure = None

    def _give_up(self, error: OSError) -> None:
        if self._successor is not None:
            self._successor.file.drop()
            self._successor = None
        self._may_grow_at, self.growth_failure = time.monotonic() + RETRY_SECONDS, error

    # -- end -----------------------------------------------------------------------------------------------------

    def is_in_place(self) -> bool:
        """False if the name leads to another file by now, or to none."""
        try:
            named, own = self.path.stat(), os.fstat(self._file.handle)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a file system that does not answer has not taken the file away
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def close(self) -> None:
        """Let go of the file; an unfinished successor is removed."""
        if self._successor is not None:
            self._successor.file.drop()
            self._successor = None
        with suppress(OSError):
            os.close(self._file.handle)


def _grown(capacity: int, needed: int) -> int:
    """Elements of a successor's table: twice as many where it is more than half full, and with room to spare."""
    doubled = 2 * capacity if 2 * needed > capacity else capacity
    return max(doubled, needed + needed // 2)


def _publish(work: Path, wish: Path) -> Path:
    """Give a complete file the first free name, whoever else does the same now; returns its path."""
    while True:
        path = choose_path(wish)
        try:
            os.link(work, path)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
            except FileExistsError:
                continue
            try:
                work.replace(path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            return path
        work.unlink()
        return path


def _remove_old(folder: Path) -> None:
    """Remove what killed runs have left unfinished; a failure does no harm."""
    with suppress(OSError):
        now = time.time()
        for path in (*folder.glob(".run-*.unfinished"), *folder.glob(f".*{SUFFIX}.successor")):
            with suppress(OSError):
                if now - path.stat().st_mtime > OLD_SECONDS:
                    path.unlink()
