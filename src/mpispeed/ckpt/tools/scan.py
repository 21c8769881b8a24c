"""Scan of all bytes of checkpoint files: checksums of blocks, NaN and infinite elements. No torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import index, numbers, schema
from mpispeed.ckpt.format.index import TensorEntry
from mpispeed.ckpt.format.manifest import FileRecord
from mpispeed.native.checksum import crc32c, crc32c_combine

#: threads that read; each has a buffer of one block
THREADS = 4
#: elements whose values are looked at together
_LOOK = 128 << 10


@dataclass(slots=True)
class Segment:
    """A run of bytes of a file, of one tensor or of the index.

    Attributes:
        tensor: the tensor of its elements; None for the index and for unknown bytes.
        is_index: True for a part of the index.
        crcs: checksum of each block of the format, filled by `scan`.
        failures: block -> reason why it could not be read.
        nan: number of NaN elements.
        infinite: number of infinite elements.

    Units:
        start, length: bytes.

    Shapes:
        crcs: int64 [blocks]
    """

    start: int
    length: int
    tensor: TensorEntry | None = None
    is_index: bool = False
    crcs: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    failures: dict[int, str] = field(default_factory=dict)
    nan: int = 0
    infinite: int = 0

    def __post_init__(self) -> None:
        self.crcs = np.zeros(schema.block_count(self.length), np.int64)

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"{self.tensor.name}/{self.tensor.slot}" if self.tensor else "the index" if self.is_index else "content"

    def block(self, number: int) -> tuple[int, int]:
        """Offset in the file and length of a block."""
        first = number * schema.BLOCK_BYTES
        return self.start + first, min(schema.BLOCK_BYTES, self.length - first)

    def checksum(self, value: int = 0) -> int:
        """Continue the checksum `value` over all of it."""
        for number, crc in enumerate(self.crcs.tolist()):
            value = crc32c_combine(value, crc, self.block(number)[1])
        return value


def segments_of(record: FileRecord, tensors: Sequence[TensorEntry]) -> tuple[list[Segment], list[str]]:
    """Segments that cover a file in order, and problems of its coverage by index and tensors.

    Args:
        record: of the file.
        tensors: those whose elements it has. Where they and the index do not fit together, they are left out.
    """
    own = [Segment(start, length, is_index=True) for start, length in record.index_extents if length]
    known = own + [Segment(tensor.offset, tensor.size_bytes, tensor) for tensor in tensors if tensor.size_bytes]
    known.sort(key=lambda segment: segment.start)
    problems, before = [], Segment(0, 0)
    for segment in [*known, Segment(record.bytes, 0)]:
        end = before.start + before.length
        if segment.start < end:
            problems.append(f"{before.label} and {segment.label} overlap at byte {segment.start}")
        elif segment.start > end and tensors:
            problems.append(f"the bytes {end} to {segment.start} belong to no tensor and not to the index")
        before = segment
    return _filled(known if not problems else own, record.bytes), problems


def _filled(known: Sequence[Segment], size: int) -> list[Segment]:
    made, position = [], 0
    for segment in [*known, Segment(size, 0)]:
        if segment.start > position:
            made.append(Segment(position, segment.start - position))
        if segment.start >= position and segment.length:
            made.append(segment)
        position = max(position, segment.start + segment.length)
    return made


def scan(folder: Path, segments: Mapping[str, Sequence[Segment]]) -> None:
    """Read all segments and fill in their results.

    Args:
        folder: of the tag.
        segments: file, relative to the folder -> its segments.

    Raises:
        CheckpointError: a file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        handles = {}
        for file in segments:
            handles[file] = index.open_plain(folder / file)
            stack.callback(os.close, handles[file])
        jobs = ((handles[f], s, n) for f, own in segments.items() for s in own for n in range(len(s.crcs)))
        _Crew(jobs).run(min(THREADS, os.cpu_count() or 1))


class _Crew:
    """Threads that take blocks from one list; reads and checksums release the GIL."""

    def __init__(self, jobs: Iterator[tuple[int, Segment, int]]) -> None:
        self._jobs, self._lock = jobs, threading.Lock()
        self._failure: BaseException | None = None

    def run(self, count: int) -> None:
        """Do all jobs; an error of a thread is raised here."""
        others = [threading.Thread(target=self._work) for _ in range(count - 1)]
        for other in others:
            other.start()
        self._work()
        for other in others:
            other.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        buffer = memoryview(bytearray(schema.BLOCK_BYTES))
        try:
            while self._failure is None:
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                self._read(*job, buffer)
        except BaseException as failure:
            self._failure = failure

    def _read(self, handle: int, segment: Segment, number: int, buffer: memoryview) -> None:
        start, length = segment.block(number)
        data, problem = buffer[:length], ""
        try:
            if index.read_at(handle, data, start) < length:
                problem = "is cut off"
        except OSError as failure:
            problem = f"cannot be read: {failure.strerror}"
        if problem:
            segment.failures[number] = problem
            return
        segment.crcs[number] = crc32c(data)
        if segment.tensor is not None:
            nan, infinite = count_odd(data, segment.tensor.dtype)
            if nan or infinite:
                with self._lock:
                    segment.nan += nan
                    segment.infinite += infinite


def count_odd(data: memoryview, dtype: str) -> tuple[int, int]:
    """Numbers of NaN and of infinite elements.

    Args:
        data: stored bytes.
        dtype: dtype name of the format.
    """
    if not (numbers.is_float(dtype) or dtype.startswith("complex")):
        return 0, 0
    stored, nan, odd = np.frombuffer(data, schema.STORAGE[dtype]), 0, 0
    for first in range(0, len(stored), _LOOK):
        values = numbers.as_numbers(stored[first : first + _LOOK], dtype)
        finite = int(np.count_nonzero(np.isfinite(values)))
        if finite < len(values):
            odd += len(values) - finite
            nan += int(np.count_nonzero(np.isnan(values)))
    return nan, odd - nan


def index_checksum(path: Path, record: FileRecord) -> int:
    """Checksum of the index of a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    crc, handle = 0, index.open_plain(path)
    try:
        for start, length in record.index_extents:
            crc = index.checksum_of(handle, start, length, crc)
    except (OSError, EOFError) as failure:
        msg = f"{path} cannot be read: {failure}"
        raise CheckpointError(msg) from failure
    finally:
        os.close(handle)
    return crc
