"""A sparse file in memory that HDF5 writes to, put on disk by ordinary writes once it is complete.

HDF5 cannot close a file that it failed to extend, so a full disk would leak the file in a training run that goes on.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.native.block_file import reserve

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

#: granularity of files in memory
_PAGE_BYTES = 64 << 10


class SparseImage(io.RawIOBase):
    """A sparse file in memory, which HDF5 writes to; keeps only pages that were written."""

    def __init__(self) -> None:
        super().__init__()
        self._pages: dict[int, bytearray] = {}
        self._size = self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end."""
        base = (0, self._position, self._size)[whence]
        self._position = base + offset
        return self._position

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of `data` at the position."""
        view = memoryview(data).cast("B")
        for page, first, part in self._cut(view):
            own = self._pages.setdefault(page, bytearray(_PAGE_BYTES))
            own[first : first + len(part)] = part
        self._position += len(view)
        self._size = max(self._size, self._position)
        return len(view)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` from the position; pages never written read as zeros."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        for page, first, part in self._cut(view):
            own = self._pages.get(page)
            part[:] = own[first : first + len(part)] if own else bytes(len(part))
        self._position += len(view)
        return len(view)

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size; HDF5 only ever asks for more."""
        self._size = self._position if size is None else size
        return self._size

    def flush(self) -> None:
        """No operation: the image is put on disk once, when it is complete."""

    def put(self, path: Path, mode: int = 0o666, *, is_reserved: bool = True) -> None:
        """Create the file; space of pages never written is reserved, or left as holes if that is not possible.

        Args:
            path: of a file that does not exist.
            mode: its permissions, before the mask of the process.
            is_reserved: False leaves holes in any case.

        Raises:
            OSError: the file exists, there is no room for it, or the file system refuses.
        """
        with open(path, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)) as file:
            try:
                has_space = is_reserved and reserve(file.fileno(), self._size)
            except OSError as failure:
                raise OSError(failure.errno, failure.strerror, str(path)) from None
            if not has_space:
                os.truncate(file.fileno(), self._size)
            for page in sorted(self._pages):
                part = memoryview(self._pages[page])[: self._size - page * _PAGE_BYTES]
                write_at(file.fileno(), part, page * _PAGE_BYTES)

    def _cut(self, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        done = 0
        while done < len(view):
            page, first = divmod(self._position + done, _PAGE_BYTES)
            part = view[done : done + _PAGE_BYTES - first]
            yield page, first, part
            done += len(part)


def write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, in as many system calls as it takes.

    Raises:
        OSError: the file system refuses.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], offset + done)
