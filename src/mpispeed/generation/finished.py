r"""Finished batches: files of checksummed records, one file for each group and start of a job.

A record is put on disk (fsync) before its batch counts as finished. A file is only appended to by the start that made
it: what a kill leaves at its end is dropped, and that batch is done again. So a job of a million prompts has a few
files, not one for each batch, which metadata servers of parallel file systems bear badly.

    file   = b"mpispeed finished 1\n" record(identity as JSON) record(answers)...
    record = magic u32, checksum of the payload u32, size of the payload u64, checksum of these 16 bytes u32, payload

Integers are little endian; checksums are CRC-32C.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from mpispeed.base.errors import MpispeedError, UsageError
from mpispeed.base.files import sync_folder
from mpispeed.base.plain import printable
from mpispeed.generation.answers import REASONS, Answers, arrays_of, pack, unpack
from mpispeed.generation.batches import Batches
from mpispeed.generation.identity import FINISHED_SUFFIX, Identity
from mpispeed.native.checksum import crc32c

ASIDE = ".aside"
"""Is appended to the name of a file that is of no use."""

MAGIC = b"mpispeed finished 1\n"
MOST_RECORD_BYTES = 1 << 32

_HEAD = struct.Struct("<IIQ")
_CHECK = struct.Struct("<I")
_RECORD = 0x4D504721
_HEAD_BYTES = _HEAD.size + _CHECK.size
_START = re.compile(r"[A-Za-z0-9_-]{1,64}")


class WorkError(MpispeedError, OSError):
    """A finished batch cannot be written or read."""


class Writer:
    """Puts the finished batches of one group on disk. Use as a context manager, or call `close`.

    The file is made with the first batch. Of the ranks of a group, the first has one.

    Args:
        folder: the work folder.
        identity: of the job.
        start: a text that no other start of the job has: letters, digits, "_" and "-", at most 64.
        group: number of the group.

    Raises:
        UsageError: `start` is no such text.
    """

    def __init__(self, folder: Path, identity: Identity, *, start: str, group: int) -> None:
        if not _START.fullmatch(start) or group < 0:
            msg = (
                f"start is {start!r:.80} and group {group}; expected 1 to 64 letters, digits, '_' and '-', and a number"
            )
            raise UsageError(msg)
        self.path = folder / f"{start}-{group:05d}{FINISHED_SUFFIX}"
        self._identity = identity
        self._handle, self._end = -1, 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def add(self, answers: Answers) -> None:
        """Put a batch on disk; when this returns, it survives a kill and a crash of the node.

        After a failure the batch does not count; it may be added again, when there is room.

        Raises:
            WorkError: the file system refuses, or the answers have more than 4 GiB.
        """
        payload = pack(answers)
        if len(payload) > MOST_RECORD_BYTES:
            msg = (
                f"the answers of batch {answers.batch} have {len(payload)} bytes; expected at most 4 GiB: make batches "
            )
            msg += "smaller"
            raise WorkError(msg)
        try:
            if self._handle < 0:
                self._open()
            self._append(_record(payload))
        except OSError as failure:
            msg = (
                f"batch {answers.batch} cannot be put on disk: {self.path}: {failure.strerror or failure}; make room, "
            )
            msg += "and start the job again: it goes on after the batches that are finished"
            raise WorkError(msg) from failure

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _open(self) -> None:
        self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            self._append(MAGIC + _record(self._identity.as_json().encode()))
            sync_folder(self.path.parent)
        except BaseException:
            self.close()
            self.path.unlink(missing_ok=True)
            self._end = 0
            raise

    def _append(self, data: bytes) -> None:
        """A failed append leaves the end where it was, so that the next one writes over its rest."""
        done, view = 0, memoryview(data)
        while done < len(view):
            done += os.pwrite(self._handle, view[done:], self._end + done)
        os.fsync(self._handle)
        self._end += len(view)


def _record(payload: bytes) -> bytes:
    head = _HEAD.pack(_RECORD, crc32c(payload), len(payload))
    return head + _CHECK.pack(crc32c(head)) + payload


@dataclass(slots=True)
class Finished:
    """The finished batches of a job.

    Attributes:
        folder: the work folder.
        done: whether each batch is finished. Shapes: (batches,).
        reasons: answers by code of `REASONS`, int64. Shapes: (len(REASONS),).
        tokens: new tokens of all answers.
        prompt_tokens: tokens of all prompts that were answered.
        seconds: that the batches took, added up over groups.
        notes: one sentence for each file, or part of one, that was of no use.
    """

    folder: Path
    done: np.ndarray
    reasons: np.ndarray = field(default_factory=lambda: np.zeros(len(REASONS), np.int64))
    tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    _files: list[Path] = field(default_factory=list)
    _places: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))

    def left(self) -> np.ndarray:
        """Numbers of the batches that are still to be done, in their order."""
        (found,) = np.nonzero(~self.done)
        return found

    def in_file_order(self) -> np.ndarray:
        """Numbers of the finished batches, in an order in which files are read from start to end."""
        (found,) = np.nonzero(self.done)
        places = self._places[found]
        order: np.ndarray = found[np.lexsort((places[:, 1], places[:, 0]))]
        return order

    def payload(self, batch: int) -> bytes:
        """The bytes of a finished batch, for `answers.arrays_of`.

        Raises:
            WorkError: it cannot be read, or is not what was scanned.
        """
        file, start, size = self._places[batch].tolist()
        path = self._files[file]
        try:
            handle = _open(path)
            try:
                found = _read(handle, start, size)
            finally:
                os.close(handle)
        except OSError as failure:
            msg = f"batch {batch} cannot be read from {path}: {failure.strerror or failure}"
            raise WorkError(msg) from failure
        payload = found[_HEAD_BYTES:]
        if len(found) != size or _head(found) != (crc32c(payload), len(payload)):
            msg = (
                f"batch {batch} in {path} was changed while it was read; start the job again: it does that batch again"
            )
            raise WorkError(msg)
        return payload

    def answers(self, batch: int) -> Answers:
        """The answers of a finished batch. Raises as `payload`."""
        return unpack(self.payload(batch))

    def _take(self, file: int, start: int, payload: bytes, batches: Batches | None) -> str:
        """Count a record; returns the reason if it is of no use."""
        try:
            arrays = arrays_of(payload)
        except ValueError as failure:
            return str(failure)
        batch = int(arrays["batch"][0])
        if not 0 <= batch < len(self.done):
            return f"it is of batch {batch}, and there are {len(self.done)}"
        if batches is not None and not np.array_equal(arrays["requests"], batches[batch]):
            return f"batch {batch} has other requests"
        if self.done[batch]:
            return f"batch {batch} is there twice"
        self.done[batch] = True
        self._places[batch] = file, start, len(payload) + _HEAD_BYTES
        self.reasons += np.bincount(arrays["reasons"], minlength=len(REASONS))
        self.tokens += len(arrays["tokens"])
        self.prompt_tokens += int(arrays["prompt_tokens"].sum(dtype=np.int64))
        self.seconds += float(arrays["seconds"][0])
        return ""


def scan(folder: Path, identity: Identity, batches: Batches | None = None, *, sets_aside: bool = False) -> Finished:
    """Find the finished batches of a job, from its files alone; every byte is compared with its checksum.

    To be called by one rank, while nobody writes.

    Args:
        folder: the work folder; may be missing.
        identity: of the job; files of others are not read.
        batches: if given, requests of records are compared with them.
        sets_aside: rename files that are of no use at all, so that they are not looked at again.

    Raises:
        WorkError: the folder cannot be read.
    """
    found = Finished(folder, np.zeros(identity.count, bool))
    found._places = np.zeros((identity.count, 3), np.int64)
    try:
        paths = (
            sorted(each for each in folder.iterdir() if each.name.endswith(FINISHED_SUFFIX)) if folder.exists() else []
        )
        for path in paths:
            problem = _scan_file(path, identity, batches, found)
            if problem:
                found.notes.append(f"{path} is set aside: {problem}")
                if sets_aside:
                    path.replace(path.with_name(f"{path.name}{ASIDE}"))
    except OSError as failure:
        msg = f"{folder} cannot be read: {failure.strerror or failure}"
        raise WorkError(msg) from failure
    return found


def _scan_file(path: Path, identity: Identity, batches: Batches | None, found: Finished) -> str:
    """Take the records of a file; returns the reason if it is of no use."""
    if path.is_symlink() or not stat.S_ISREG(path.lstat().st_mode):
        return "it is no ordinary file"
    handle = _open(path)
    try:
        if _read(handle, 0, len(MAGIC)) != MAGIC:
            return "it is no file of finished batches"
        notes: list[str] = []
        records = _records(path, handle, os.fstat(handle).st_size, notes)
        _, head = next(records, (0, b""))
        if not head:
            return "its first record is not whole, as a kill leaves it"
        try:
            other = Identity.from_json(head)
        except ValueError as failure:
            return f"it does not say whose it is: {failure}"
        if other.digest != identity.digest:
            return f"it belongs to another job ({', '.join(identity.differences(other)) or 'other batches'})"
        found._files.append(path)
        for start, payload in records:
            problem = found._take(len(found._files) - 1, start, payload, batches)
            if problem:
                notes.append(f"a record at byte {start} of {path} is left out: {printable(problem, 200)}")
        found.notes += notes
    finally:
        os.close(handle)
    return ""


def _records(path: Path, handle: int, size: int, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    """(start, payload) of each whole record."""
    place = len(MAGIC)
    while place < size:
        head = _head(_read(handle, place, _HEAD_BYTES))
        if head is None or head[1] > size - place - _HEAD_BYTES:
            notes.append(f"the last {size - place} bytes of {path} are no whole record, as a kill leaves it; left out")
            return
        checksum, count = head
        payload = _read(handle, place + _HEAD_BYTES, count)
        if crc32c(payload) == checksum:
            yield place, payload
        else:
            notes.append(f"the record at byte {place} of {path} is damaged; its batch is done again")
        place += _HEAD_BYTES + count


def _head(raw: bytes) -> tuple[int, int] | None:
    """Checksum and size of the payload; None if this is no head of a record."""
    if len(raw) < _HEAD_BYTES:
        return None
    magic, checksum, size = _HEAD.unpack_from(raw)
    (check,) = _CHECK.unpack_from(raw, _HEAD.size)
    if magic != _RECORD or check != crc32c(raw[: _HEAD.size]) or size > MOST_RECORD_BYTES:
        return None
    return checksum, size


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _read(handle: int, start: int, size: int) -> bytes:
    """Bytes at a place, fewer where the file ends."""
    parts, left = [], size
    while left:
        part = os.pread(handle, left, start + size - left)
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
