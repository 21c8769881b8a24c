"""Writers of element files, with O_DIRECT and several blocks in flight where the file system supports it.

Ranks that write into one file through the page cache wait for each other, because file systems lock a file for every
buffered write; writes with O_DIRECT into space that is reserved already do not (measured on ext4, two ranks: 1.6 to
5 times as fast). Bytes outside of aligned blocks go through the page cache.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CheckpointError, NativeMissing
from mpispeed.ckpt.format.hdf5 import write_at
from mpispeed.native.block_file import BlockFile

if TYPE_CHECKING:
    from mpispeed.native.block_io import BlockIO, Transfer

#: blocks under way at a time, and requests that the system has of them
_DEPTH = 8
#: smaller ones are not worth a queue
_LEAST_BYTES = 256 << 10


class OpenFiles:
    """The files with elements, opened at their first write. A context manager."""

    def __init__(self, folder: Path, names: Sequence[str], *, is_direct: bool = True) -> None:
        """Args: `is_direct`: with O_DIRECT where the file system has it."""
        self._folder, self._names = folder, names
        self._files: dict[int, BlockFile] = {}
        self._under_way: deque[tuple[Transfer, str]] = deque()
        self._io = _make_io(folder) if is_direct and names else None

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()  # waits for what is under way
        self._files.clear()
        self._under_way.clear()
        if self._io is not None:
            self._io.close()

    def path(self, file: int) -> Path:
        """Path of a file, by its number."""
        return self._folder / self._names[file]

    def write(self, file: int, data: memoryview, offset: int, label: str) -> None:
        """Write bytes at an offset of a file; their memory must not change before `settle`.

        Args:
            file: its number.
            data: writable memory, which is only read.
            offset: in the file.
            label: name of the bytes, for messages.

        Raises:
            CheckpointError: this write or one before it failed.
        """
        while len(self._under_way) >= _DEPTH:
            self._end_first()
        try:
            target = self._open(file)
            if self._io is None or len(data) < _LEAST_BYTES:
                write_at(target.descriptors(has_odd_bytes=True)[1], data, offset)
            else:
                bytes_of = torch.frombuffer(data, dtype=torch.uint8)
                self._under_way.append((self._io.write(target, bytes_of, offset), label))
        except OSError as failure:
            msg = f"writing {label} to {self.path(file)}: {failure}"
            raise CheckpointError(msg) from failure

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            CheckpointError: one of them failed.
        """
        while self._under_way:
            self._end_first()

    def sync(self) -> None:
        """Wait until all writes are on the disk.

        Raises:
            CheckpointError: a write failed, or the file system refuses.
        """
        self.settle()
        for number, file in self._files.items():
            try:
                os.fsync(file.descriptors(has_odd_bytes=True)[1])
            except OSError as failure:
                msg = f"bringing {self.path(number)} to the disk: {failure}"
                raise CheckpointError(msg) from failure

    def _end_first(self) -> None:
        transfer, label = self._under_way.popleft()
        try:
            transfer.wait()
        except OSError as failure:
            msg = f"writing {label}: {failure}"
            raise CheckpointError(msg) from failure

    def _open(self, file: int) -> BlockFile:
        if file not in self._files:
            try:
                self._files[file] = BlockFile(self.path(file), direct=self._io is not None)
            except OSError as failure:
                if self._io is None or failure.errno != errno.EINVAL:
                    raise
                self._files[file] = BlockFile(self.path(file), direct=False)  # the folder has O_DIRECT, this file not
        return self._files[file]


def _make_io(folder: Path) -> BlockIO | None:
    """An I/O queue if O_DIRECT works beside `folder`, else None; cached by the folder of checkpoints."""
    from mpispeed.native.block_io import BlockIO, Options
    from mpispeed.native.block_probe import probe

    try:
        return BlockIO(Options(queue_depth=_DEPTH)) if probe(folder.parent).is_direct else None
    except (NativeMissing, OSError):  # plain writes do the same
        return None
