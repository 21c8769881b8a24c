"""Elements by their places in files: plain data that other processes read from, without a mapping of the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignMismatch, ForeignMissing
from mpispeed.ckpt.foreign.mapping import Notes, map_file
from mpispeed.ckpt.foreign.values import Plain, Values
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.format.index import read_at
from mpispeed.native.checksum import crc32c

#: of tensors whose elements are in memory although they came from a file
_MEMORY_BYTES = 1 << 20

State = tuple[int, int]
"""Size and time of change of a file."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Checksums of the blocks of `schema.BLOCK_BYTES` of a tensor of one of our checkpoints.

    Attributes:
        label: the tensor, for messages.
    """

    label: str
    table: np.ndarray


class InFile(Values):
    """Elements that lie one behind the other in a file.

    Attributes:
        path, offset: file, and the byte of the first element.
        blocks: checksums that are compared with whatever is read; None for none.
    """

    def __init__(self, path: str, offset: int, numel: int, dtype: torch.dtype, blocks: Blocks | None = None) -> None:
        super().__init__(numel, dtype)
        self.path, self.offset, self.blocks = path, offset, blocks

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        with Files() as files:
            return self.read_by(files, first, last)

    def read_by(self, files: Files, first: int, last: int) -> torch.Tensor:
        """As `read`, through open files."""
        out = torch.empty(last - first, dtype=self.dtype)
        self.fill(files, first, schema.as_bytes(out))
        return out

    def fill(self, files: Files, first: int, data: memoryview) -> None:
        """Fill `data` with the bytes of the elements from `first` on.

        Raises:
            CorruptCheckpoint: the file is shorter than it was, or bytes do not match their checksum.
            ForeignMissing, ForeignMismatch: the file has gone or was changed.
        """
        start = first * self.dtype.itemsize
        if self.blocks is None:
            files.read(self.path, data, self.offset + start)
            return
        done = 0
        while done < len(data):
            block, inner = divmod(start + done, schema.BLOCK_BYTES)
            size = min(schema.BLOCK_BYTES, self.nbytes - block * schema.BLOCK_BYTES)
            part = data[done : done + size - inner]
            whole = part if len(part) == size else memoryview(bytearray(size))
            files.read(self.path, whole, self.offset + block * schema.BLOCK_BYTES)
            self._check(self.blocks, block, whole)
            if whole is not part:
                part[:] = whole[inner : inner + len(part)]
            done += len(part)

    def check(self, first: int, data: memoryview) -> None:
        """Compare bytes of the elements from `first` on, whole blocks, with their checksums.

        Raises:
            CorruptCheckpoint: one does not match.
        """
        if self.blocks is None:
            return
        start = first * self.dtype.itemsize
        for done in range(0, len(data), schema.BLOCK_BYTES):
            part = data[done : done + schema.BLOCK_BYTES]
            self._check(self.blocks, (start + done) // schema.BLOCK_BYTES, part)

    def _check(self, blocks: Blocks, block: int, data: memoryview) -> None:
        if crc32c(data) != int(blocks.table[block]):
            at = self.offset + block * schema.BLOCK_BYTES
            msg = f"{self.path} is damaged: the {len(data)} bytes of {blocks.label} at byte {at} do not match their "
            msg += "checksum; load another tag"
            raise CorruptCheckpoint(msg)


class Spread(Values):
    """A tensor of a file whose elements are not in row-major order. The file is mapped while some are read."""

    def __init__(self, path: str, offset: int, like: torch.Tensor) -> None:
        super().__init__(like.numel(), like.dtype)
        self._path, self._offset = path, offset
        self._shape, self._stride = tuple(like.shape), like.stride()

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        span = 1 + sum((count - 1) * step for count, step in zip(self._shape, self._stride, strict=True))
        raw = np.memmap(self._path, np.uint8, "c", self._offset, (span * self.dtype.itemsize,))
        whole = torch.from_numpy(raw).view(self.dtype).as_strided(self._shape, self._stride)
        return Plain(whole).read(first, last).clone()


class Files:
    """Open files by their path; any thread may read. Use as a context manager.

    Args:
        states: size and time of change that files have to have; others are not compared.

    Attributes:
        bytes_read: by this process.
    """

    def __init__(self, states: dict[str, State] | None = None) -> None:
        self._states, self._handles, self._lock = dict(states or {}), dict[str, int](), threading.Lock()
        self._maps: dict[str, torch.Tensor] = {}
        self.bytes_read = 0

    def __enter__(self) -> Files:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close them."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def read(self, path: str, data: memoryview, offset: int) -> None:
        """Fill `data` from byte `offset`.

        Raises:
            ForeignMissing: the file cannot be opened.
            ForeignMismatch: it was changed.
            ForeignCorrupt: it is shorter.
        """
        try:
            count = read_at(self._handle(path), data, offset)
        except OSError as failure:
            msg = f"{path} cannot be read at byte {offset}: {failure.strerror}"
            raise ForeignCorrupt(msg) from failure
        with self._lock:
            self.bytes_read += count
        if count < len(data):
            msg = f"{path} ends at byte {offset + count}, before the {len(data)} bytes at {offset} that a tensor has"
            raise ForeignCorrupt(msg)

    def mapped(self, path: str) -> torch.Tensor:
        """The bytes of a file, mapped copy-on-write, once.

        Raises:
            ForeignMissing, ForeignMismatch: as `read`.
        """
        self._handle(path)
        with self._lock:
            if path not in self._maps:
                self._maps[path] = map_file(Path(path))
            return self._maps[path]

    def _handle(self, path: str) -> int:
        with self._lock:
            if path not in self._handles:
                try:
                    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as failure:
                    msg = f"{path} cannot be opened: {failure.strerror}"
                    raise ForeignMissing(msg) from failure
                self._handles[path] = handle
                if self._states.get(path, _state(os.fstat(handle))) != _state(os.fstat(handle)):
                    msg = f"{path} was changed while weights were loaded from it; load them again"
                    raise ForeignMismatch(msg)
            return self._handles[path]


def _state(status: os.stat_result) -> State:
    return status.st_size, status.st_mtime_ns


def states_of(paths: Sequence[str]) -> dict[str, State]:
    """What files are now.

    Raises:
        CheckpointError: one has gone.
    """
    try:
        return {path: _state(Path(path).stat()) for path in paths}
    except OSError as failure:
        msg = f"{failure.filename} cannot be read: {failure.strerror}"
        raise CheckpointError(msg) from failure


def located(values: Values, notes: Notes, name: str) -> Values:
    """The same elements by their places in files; small ones that are in memory stay so.

    Args:
        values: of a checkpoint that was opened while the notes were taken.
        notes: as they were taken.
        name: of the tensor, for the message.

    Raises:
        ForeignMismatch: many of them are in memory, because they are not aligned in their file.
    """

    def of(plain: Plain) -> Values:
        tensor = plain.tensor
        place = notes.place(tensor) if tensor.numel() else None
        if place is None:
            if tensor.nbytes > _MEMORY_BYTES:
                msg = (
                    f"{name!r}: its elements are not aligned in their file; load the file and save it again with torch"
                )
                raise ForeignMismatch(msg)
            return Plain(tensor.clone())
        path, first = place
        if tensor.is_contiguous():
            return InFile(path, first, tensor.numel(), tensor.dtype)
        return Spread(path, first, tensor)

    return values.replaced(of)
