"""The writer of a run record: calls only put values into memory, a thread of its own brings them to the file."""

from __future__ import annotations

import atexit
import json
import logging
import os
import struct
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.base.plain import printable
from mpispeed.record.layout import MOST_NAME_BYTES, MOST_NOTE_BYTES, RESERVED, ROW, SPAN, fact
from mpispeed.record.record_file import Contents, RecordFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""A kill costs the rows of so long."""
MOST_WAITING = 200_000
"""Rows that wait for a slow file system; more are dropped, and counted."""
MOST_NOTES_WAITING = 10_000
CLOSE_SECONDS = 10.0
LOOK_SECONDS = 30.0
"""How often the writer looks whether its file is still there."""

_PACK = struct.Struct("<IIQQdd").pack


class RecordWriter:
    """A new run record, written to until it is closed or the process ends. Thread-safe.

    Nothing but making it and closing it waits for the file system. What goes wrong afterwards is a single warning.

    Attributes:
        path: of the file.
        run: an id that no other record has.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        facts: Mapping[str, Any],
        *,
        reserved: Mapping[str, int] = RESERVED,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        """Make the file and start the thread.

        Args:
            path: a folder, or a name that ends in .h5; a number is added if it is taken.
            facts: values that JSON knows, by name; see `facts`.
            reserved: elements of each table that the file has space for at first.
            flush_seconds: from flush to flush.

        Raises:
            OSError: the file cannot be made.
        """
        self.run = uuid.uuid4().hex
        attributes = {"run": self.run, "started": time.time(), "host": os.uname().nodename}
        contents = Contents(attributes, {name: fact(value) for name, value in facts.items()})
        self._file = RecordFile(Path(path), contents, {**RESERVED, **reserved})
        self._rows: deque[bytes] = deque()
        self._arrays: deque[bytes] = deque()
        self._notes: deque[bytes] = deque()
        self._spans: deque[bytes] = deque()
        self._names: deque[bytes] = deque()
        self._waiting = self._dropped = 0
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._wake, self._is_closing = threading.Event(), False
        self._pid = os.getpid()
        self._flush_seconds = flush_seconds
        self._thread = threading.Thread(target=self._run, name="mpispeed run record", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._file.path

    # -- what callers say ----------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        """The number of a series, a lane or a span."""
        found = self._numbers.get(name)
        if found is not None:
            return found
        with self._lock:
            if name not in self._numbers:
                line = printable(name).encode(errors="replace")[:MOST_NAME_BYTES].decode(errors="ignore")
                self._names.append(f"{line}\n".encode())
                self._numbers[name] = len(self._numbers)
            return self._numbers[name]

    def row(
        self, series: str, value: float, *, step: int, samples: int, rank: int = 0, time: float | None = None
    ) -> None:
        """Add a point to a series; `time` is in seconds since 1970, now if it is left out."""
        number = self._numbers.get(series)
        if number is None:
            number = self.number(series)
        if len(self._rows) >= MOST_WAITING:
            with self._lock:
                self._dropped += 1
            return
        self._rows.append(_PACK(number, rank, step, samples, _now() if time is None else time, value))

    def rows(self, array: np.ndarray) -> None:
        """Add points, a ROW array whose series are numbers from `number`."""
        array = np.ascontiguousarray(array, ROW)
        with self._lock:
            if len(array) + self._waiting > MOST_WAITING:
                self._dropped += len(array)
                return
            self._waiting += len(array)
        self._arrays.append(array.tobytes())

    def note(self, kind: str, **values: Any) -> None:
        """Add a note of something that happened now."""
        when = {"time": time.time(), "kind": kind}
        line = json.dumps({**when, **values}, default=str).encode()
        if len(line) >= MOST_NOTE_BYTES:
            text = line[: MOST_NOTE_BYTES // 2].decode(errors="ignore")
            line = json.dumps({**when, "text": text[: MOST_NOTE_BYTES // 4], "is_cut": True}).encode()
        if len(self._notes) < MOST_NOTES_WAITING:
            self._notes.append(line + b"\n")

    def spans(self, array: np.ndarray, names: Sequence[str]) -> None:
        """Add spans, a SPAN array whose lanes and names are places in `names`."""
        numbers = np.array([self.number(name) for name in names], np.uint32)
        array = np.array(array, SPAN)
        array["lane"], array["name"] = numbers[array["lane"]], numbers[array["name"]]
        self._spans.append(array.tobytes())

    def flush(self) -> None:
        """Bring to the file now what is there; does not wait for it."""
        self._wake.set()

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Write what is left, and end; a file system that does not answer is waited for so long."""
        if os.getpid() != self._pid or self._is_closing:
            return  # a fork has the object and neither the thread nor the right to write
        self._is_closing = True
        self._wake.set()
        self._thread.join(limit_seconds)
        atexit.unregister(self.close)
        if self._thread.is_alive():
            log.warning(
                "the run record %s is not complete: its file system has not answered for %g s; what was written until "
                "then can be read", self.path, limit_seconds,
            )  # fmt: skip

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        carrier = _Carrier(self._file, self._take, self._flush_seconds)
        try:
            while not self._is_closing:
                self._wake.wait(self._flush_seconds)
                self._wake.clear()
                carrier.carry()
            carrier.end()
        except Exception:
            log.exception("the run record %s goes no further; training does", self.path)
        finally:
            self._file.close()

    def _take(self) -> tuple[dict[str, bytes], int]:
        """All that waits, by table; names last, so that those of all the rest are among them."""
        rows, arrays = _drained(self._rows), _drained(self._arrays)
        with self._lock:
            self._waiting -= sum(map(len, arrays)) // ROW.itemsize
            dropped = self._dropped
        parts = {"rows": b"".join((*rows, *arrays)), "notes": b"".join(_drained(self._notes))}
        parts["spans"] = b"".join(_drained(self._spans))
        parts["names"] = b"".join(_drained(self._names))
        return parts, dropped


class _Carrier:
    """The thread's side: brings what waits to the file, and tries again what the file system has refused."""

    def __init__(self, file: RecordFile, take: Callable[[], tuple[dict[str, bytes], int]], seconds: float) -> None:
        self._file, self._take, self._seconds = file, take, seconds
        self._parts: dict[str, bytes] = {}
        self._dropped = self._lost = 0  # rows: by callers, and here at the end
        self._has_warned = False
        self._looked = time.monotonic()

    def carry(self) -> None:
        """Write what waits, and bring a successor further, with a flush whenever one is due."""
        self._flush()
        began = time.monotonic()
        while self._file.advance():
            if time.monotonic() - began > self._seconds:
                self._flush()
                began = time.monotonic()
        if began - self._looked > LOOK_SECONDS:
            self._look()

    def end(self) -> None:
        """Write what is left, and that this is all."""
        later, self._dropped = self._take()
        self._parts = {table: self._parts.get(table, b"") + data for table, data in later.items()}
        self._flush(is_ended=True)
        if any(self._parts.values()):  # refused: what has happened is told all the same, if that is possible
            self._lost += len(self._parts.pop("rows")) // ROW.itemsize
            del self._parts["spans"]
            self._flush(is_ended=True)
        self._look()

    def _flush(self, *, is_ended: bool = False) -> None:
        if not any(self._parts.values()):
            self._parts, dropped = self._take()
            has_news = any(self._parts.values()) or is_ended or dropped != self._dropped
            self._dropped = dropped
            if not has_news:
                return
        try:
            self._file.append(self._parts, dropped=self._dropped + self._lost, is_ended=is_ended)
        except OSError as error:
            self._warn("cannot be written (%s): rows are kept for a while and then lost; training goes on", error)
        else:
            self._parts = {}

    def _look(self) -> None:
        self._looked = time.monotonic()
        if not self._file.is_in_place():
            self._warn("has been moved, removed or replaced while it was written%s; training goes on", "")

    def _warn(self, text: str, why: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(f"the run record %s {text}", self._file.path, why)  # noqa: G004 - one of two texts


def _drained(waiting: deque[bytes]) -> list[bytes]:
    """All that is there now, taken out; what is added meanwhile stays."""
    return [waiting.popleft() for _ in range(len(waiting))]


_now = time.time  # `row` has an argument of that name
