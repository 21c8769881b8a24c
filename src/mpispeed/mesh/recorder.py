"""The flight recorder: operations of this rank in a mapped file, readable when the rank hangs or has died.

Rows are written before an operation begins and completed when it has ended, by the thread that carries it out. A
row costs a few microseconds. Nothing is recorded before `open_recorder`, nor for simulated ranks.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

import numpy as np

from mpispeed.base import recorder_file as form
from mpispeed.base.recorder_words import MAIN, OTHER, Kind, Order, State

_OPEN: dict[str, FlightRecorder] = {}

NO_ROW = -1
MOST_BUSY = form.ROWS - 256
"""Operations under way at a time that have rows; beyond it nothing is proven of the rank any more."""

SHOW_NAP_SECONDS = 0.01
_PACK_ROW = struct.Struct(form.ROW_FORMAT).pack_into
_PACK_U8 = struct.Struct("<Q").pack_into
_PACK_F8 = struct.Struct("<d").pack_into
_ROW_BYTES, _ROWS, _ROWS_AT = form.ROW.itemsize, form.ROWS, form.ROWS_AT
_END_AT = int(form.ROW.fields["end"][1])  # type: ignore[index]
_POSTED_AT = int(form.ROW.fields["posted"][1])  # type: ignore[index]
_SEQ_MASK = (1 << 63) - 1

_PASSED_OVER = ("/torch/", "/mpi4py/", "/contextlib.py", "/threading.py", "/runpy.py", "/concurrent/")
_OWN = str(Path(__file__).resolve().parents[1]) + os.sep

_THREADS: dict[int, int] = {}
"""By a thread's number: 1 + the channel that is its own."""

_SITES_OF_THREADS: dict[int, str] = {}
"""Who started what a channel's thread carries out now, by the thread's number."""


class CallSequence:
    """A group of ranks in the recorder: its key is equal on all of its members, and unique among groups."""

    __slots__ = ("_children", "_recvs", "_sends", "gates", "is_told", "key", "name", "ranks", "seq")

    def __init__(self, key: int, name: str, ranks: Sequence[int]) -> None:
        self.key, self.name, self.ranks = key, name, ranks
        self.seq = self.gates = 0
        self.is_told = False
        self._children = 0
        self._sends: dict[tuple[int, int], int] = {}
        self._recvs: dict[tuple[int, int], int] = {}

    @classmethod
    def root(cls, name: str, ranks: Sequence[int]) -> CallSequence:
        """A group that has no parent."""
        return cls(_key(f"{name}/{form.ranks_text(ranks)}"), name, ranks)

    def child(self, color: int, name: str, ranks: Sequence[int]) -> CallSequence:
        """A group made of this one. Members of a group make others of it in the same order."""
        self._children += 1
        return CallSequence(_key(f"{self.key:x}/{self._children}/{color}"), name, ranks)

    def next_of(self, kind: Kind, peer: int, tag: int) -> int:
        """The position of the next operation; messages are counted by peer and tag."""
        if kind is Kind.COLLECTIVE:
            self.seq += 1
            return self.seq
        if kind is Kind.GATE:
            self.gates += 1
            return self.gates
        counts = self._sends if kind is Kind.SEND else self._recvs
        number = counts[peer, tag] = counts.get((peer, tag), 0) + 1
        return number


class FlightRecorder:
    """The file of this process."""

    def __init__(self, path: Path, rank: int, world: int, local_rank: int) -> None:
        """Map the file.

        Raises:
            OSError: it cannot be made, or there is no memory for it.
        """
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserved now: memory that is missing later would be a bus error, not an exception.
            os.posix_fallocate(number, 0, form.FILE_BYTES)
            self._map = mmap.mmap(number, form.FILE_BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(number)
        self.header = np.frombuffer(self._map, form.HEADER, 1)[0:1]
        self._strings: dict[str, int] = {}
        self._strings_end = 0
        self._next = 0
        self._busy: set[int] = set()
        self._waited = NO_ROW
        self._bases: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._lock = threading.Lock()
        for name, value in (("rank", rank), ("world", world), ("local_rank", local_rank), ("pid", os.getpid())):
            self.header[name] = value
        self.intern("")
        self.header["magic"] = form.MAGIC

    # -- rows ----------------------------------------------------------------------------------------------------

    def begin(
        self,
        sequence: CallSequence,
        kind: Kind,
        verb: str,
        *,
        dtype: str = "",
        op: str = "",
        count: int = 0,
        peer: int = -1,
        tag: int = 0,
        label: str = "",
        site: str = "",
        channel: int = 0,
    ) -> int:
        """Write that an operation begins; returns its row, or NO_ROW where too many are under way.

        `peer` is a world rank, `channel` 1 + the number of the channel of a started operation.
        """
        if not sequence.is_told:
            self._tell(sequence)
        seq = sequence.next_of(kind, peer, tag)
        if len(self._busy) >= MOST_BUSY:
            self.header["is_open"] = 1
            return NO_ROW
        what, base = self._what(verb, dtype, op)
        sig = (base ^ (count * 0x9E3779B97F4A7C15) ^ ((peer + 2) * 0xC2B2AE3D27D4EB4F)) & _SEQ_MASK
        site_id = self.intern(site or caller())
        label_id = self.intern(label) if label else 0
        thread = channel or thread_number()
        if thread == OTHER:
            self.header["is_open"] = 1
        now = time.monotonic()
        with self._lock:
            row = self._next
            while row % _ROWS in self._busy:
                row += 1
            self._next = row + 1
            self._busy.add(row % _ROWS)
        offset = _ROWS_AT + row % _ROWS * _ROW_BYTES
        _PACK_ROW(
            self._map, offset, 0, sequence.key, seq, sig, now, 0.0, count, what, site_id, label_id, peer, tag, thread,
            kind, 0,
        )  # fmt: skip
        _PACK_U8(self._map, offset, row + 1)
        return row

    def end(self, row: int) -> None:
        """Write that the operation of a row has ended."""
        if row == NO_ROW:
            return
        _PACK_F8(self._map, _ROWS_AT + row % _ROWS * _ROW_BYTES + _END_AT, time.monotonic())
        self._busy.discard(row % _ROWS)

    def post(self, row: int) -> None:
        """Write that this rank has posted the gate of a started operation, or that a message is only posted."""
        if row == NO_ROW:
            return
        self._map[_ROWS_AT + row % _ROWS * _ROW_BYTES + _POSTED_AT] = 1

    def waits_for(self, row: int) -> None:
        """Write that the main thread waits for a started operation; NO_ROW ends that. Others are not noted.

        Short waits for the same operation in a row count as one, from the first.
        """
        if thread_number() != MAIN:
            return
        if row == NO_ROW:
            _PACK_U8(self._map, _WAIT_ROW_AT, 0)
            return
        if self._waited != row:
            self._waited = row
            _PACK_F8(self._map, _WAIT_SINCE_AT, time.monotonic())
        _PACK_U8(self._map, _WAIT_ROW_AT, row + 1)

    def may_wait_for(self, row: int) -> None:
        """Write that code which cannot be seen may wait for a started operation on the main thread."""
        if row != NO_ROW and thread_number() == MAIN:
            _PACK_F8(self._map, _FUTURE_SINCE_AT, time.monotonic())
            _PACK_U8(self._map, _FUTURE_ROW_AT, row + 1)

    # -- texts ---------------------------------------------------------------------------------------------------

    def intern(self, text: str) -> int:
        """The number of a text; 0, which is no text, when there is no room left."""
        number = self._strings.get(text)
        return self._add(text, form.STRING_BYTES - form.RESERVED_BYTES) if number is None else number

    def _add(self, text: str, room_bytes: int = form.STRING_BYTES) -> int:
        data = text.encode(errors="replace")
        with self._lock:
            if text in self._strings:
                return self._strings[text]
            end = self._strings_end + 2 + len(data)
            if end > room_bytes or len(data) > 0xFFFF:
                return 0
            start = form.STRINGS_AT + self._strings_end
            self._map[start : start + 2 + len(data)] = len(data).to_bytes(2, "little") + data
            self._strings[text] = number = len(self._strings)
            self._strings_end = end
            self.header["strings_end"] = end
        return number

    def _tell(self, sequence: CallSequence) -> None:
        sequence.is_told = True
        self._add(f"{form.COMM_MARK}{sequence.key:x}\t{sequence.name}\t{form.ranks_text(sequence.ranks)}")

    def _what(self, verb: str, dtype: str, op: str) -> tuple[int, int]:
        found = self._bases.get((verb, dtype, op))
        if found is None:
            text = f"{verb}\t{dtype}\t{op}"
            found = self._bases[verb, dtype, op] = (self._add(text), crc32(text.encode()) * 0x9E3779B1)
        return found

    # -- the rank as a whole ---------------------------------------------------------------------------------------

    def enter(self, state: State, exit_code: int = 0) -> None:
        """Write a new state of the rank's life."""
        self.header["exit_code"] = exit_code
        self.header["state"] = int(state)

    def last_words(self, text: str, *, is_shown: bool) -> None:
        """Write the text of the error that ends this rank; `is_shown` if this rank has written it to stderr."""
        self.write_words(form.WORDS_AT, text)
        self.header["has_shown"] = int(is_shown)

    def write_words(self, offset: int, text: str) -> None:
        """Write a text of bounded length in its place; of a longer one the beginning and the end are kept."""
        data = text.encode(errors="replace")
        room = form.WORD_BYTES - 4
        if len(data) > room:
            data = data[: room // 2] + b"\n...\n" + data[5 - room + room // 2 :]
        self._map[offset + 4 : offset + 4 + len(data)] = data
        self._map[offset : offset + 4] = len(data).to_bytes(4, "little")

    def show(self, limit_seconds: float) -> bool:
        """Wait until the watchdog has read everything so far; False if it does not within the limit."""
        shown = int(self.header["shown"][0]) + 1
        self.header["shown"] = shown
        end = time.monotonic() + limit_seconds
        while self.header["looked"][0] < shown:
            if time.monotonic() > end:
                return False
            time.sleep(SHOW_NAP_SECONDS)
        return True

    @property
    def has_order(self) -> bool:
        """True if the watchdog has told this rank to end."""
        return bool(self.header["order"][0] != Order.NONE)

    def note_step(self, event: Mapping[str, Any]) -> None:
        """Note that a step of training has ended, `event["global_step"]`."""
        self.header["step"] = event["global_step"]
        self.header["step_at"] = time.monotonic()


_WAIT_ROW_AT, _WAIT_SINCE_AT = form.at("wait_row"), form.at("wait_since")
_FUTURE_ROW_AT, _FUTURE_SINCE_AT = form.at("future_row"), form.at("future_since")


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def caller(frame: FrameType | None = None) -> str:
    """The call site of this package: "file:line in function", with our function that was called first.

    From the given innermost frame, or that of the caller; on a channel's thread, who started what it carries out.
    """
    known = _SITES_OF_THREADS.get(threading.get_ident()) if frame is None else None
    if known is not None:
        return known
    frame, via = frame or sys._getframe(1), ""
    innermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        is_ours = _KINDS.get(name)
        if is_ours is None:
            is_ours = _KINDS[name] = _is_passed_over(name)
        if not is_ours:
            return _site(name, frame.f_lineno, frame.f_code, via)
        if is_ours == _IS_OURS:
            via = frame.f_code.co_name
        frame = frame.f_back
    return _site(innermost.f_code.co_filename, innermost.f_lineno, innermost.f_code, "")


_IS_OURS, _IS_PASSED = 1, 2
_KINDS: dict[str, int] = {}
_TEXTS: dict[tuple[str, int, str], str] = {}


def _is_passed_over(name: str) -> int:
    if name.startswith(_OWN):
        return _IS_OURS
    return _IS_PASSED if name.startswith("<frozen") or any(part in name for part in _PASSED_OVER) else 0


def _site(name: str, line: int, code: CodeType, via: str) -> str:
    text = _TEXTS.get((name, line, via))
    if text is None:
        function = getattr(code, "co_qualname", code.co_name)
        inside = "" if function == "<module>" else f" in {function}"
        text = _TEXTS[name, line, via] = f"{_short(name)}:{line}{inside}{f' ({via})' if via else ''}"
    return text


def _short(name: str) -> str:
    """A path as people name it: from the working folder, if it is below it."""
    path = Path(name)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return name


def adopt_thread(channel: int) -> None:
    """Mark this thread as that of a channel, for its rows."""
    _THREADS[threading.get_ident()] = channel + 1


def leave_thread() -> None:
    """Unmark a channel's thread at its end: the next one with its number may be another's."""
    _THREADS.pop(threading.get_ident(), None)
    _SITES_OF_THREADS.pop(threading.get_ident(), None)


def thread_number() -> int:
    """Number of this thread, for rows."""
    ident = threading.get_ident()
    if ident == threading.main_thread().ident:
        return MAIN
    return _THREADS.get(ident, OTHER)


def skip(sequence: CallSequence, kind: Kind, peer: int = -1, tag: int = 0) -> None:
    """Count an operation without an open recorder, so that numbers are right once there is one."""
    sequence.next_of(kind, peer, tag)


def started_here(site: str) -> None:
    """Set the start site of the operation that this channel thread carries out next; "" when it is done."""
    if site:
        _SITES_OF_THREADS[threading.get_ident()] = site
    else:
        _SITES_OF_THREADS.pop(threading.get_ident(), None)


def open_recorder(path: Path, rank: int, world: int, local_rank: int) -> FlightRecorder:
    """Begin to record. Only one recorder is open in a process.

    Raises:
        OSError: the file cannot be made.
    """
    _OPEN["recorder"] = recorder = FlightRecorder(path, rank, world, local_rank)
    recorder.enter(State.RUNNING)
    return recorder


# The child of a fork maps the same memory, but its operations are not this rank's.
os.register_at_fork(after_in_child=_OPEN.clear)


def current() -> FlightRecorder | None:
    """The open recorder of this process."""
    return _OPEN.get("recorder")


def close_recorder() -> None:
    """Stop recording."""
    _OPEN.clear()
