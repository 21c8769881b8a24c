"""A file as HDF5 would change it, while nothing of it is changed: writes are kept in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

PAGE_BYTES = 4096


class Overlay(io.RawIOBase):
    """The first bytes of an open file with what was written over them and behind them.

    Attributes:
        size: in bytes, as HDF5 has set it.
    """

    def __init__(self, handle: int, base_bytes: int) -> None:
        """Begin with the file as it is.

        Args:
            handle: of the file, for reading.
            base_bytes: what is behind so many bytes is not looked at.
        """
        super().__init__()
        self._handle, self._base_bytes = handle, base_bytes
        self.size, self._position = base_bytes, 0
        self._pages: dict[int, bytearray] = {}

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end."""
        self._position = (0, self._position, self.size)[whence] + offset
        return self._position

    def write(self, data: ReadableBuffer, /) -> int:
        """Keep all of `data` for the position."""
        view = memoryview(data).cast("B")
        for page, first, part in self._cut(view):
            if page not in self._pages:
                self._pages[page] = bytearray(self._page(page))
            self._pages[page][first : first + len(part)] = part
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` from the position."""
        view = memoryview(buffer).cast("B")[: max(0, self.size - self._position)]
        for page, first, part in self._cut(view):
            part[:] = self._page(page)[first : first + len(part)]
        self._position += len(view)
        return len(view)

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size."""
        self.size = self._position if size is None else size
        return self.size

    def flush(self) -> None:
        """No operation: nothing goes to the file."""

    def changed(self) -> list[tuple[int, bytes]]:
        """Offset and bytes of every page, or part of one, that differs from the file or lies behind its first bytes."""
        found = []
        for page, own in sorted(self._pages.items()):
            begin = page * PAGE_BYTES
            old = max(0, min(PAGE_BYTES, self._base_bytes - begin))  # bytes of it that the file has
            if bytes(own[:old]) != self._base(page)[:old]:
                found.append((begin, bytes(own[:old])))
            if old < PAGE_BYTES and begin + old < self.size:
                found.append((begin + old, bytes(own[old : self.size - begin])))
        return found

    def _page(self, page: int) -> bytes | bytearray:
        return self._pages[page] if page in self._pages else self._base(page)

    def _base(self, page: int) -> bytes:
        begin = page * PAGE_BYTES
        nbytes = max(0, min(PAGE_BYTES, self._base_bytes - begin))
        return (os.pread(self._handle, nbytes, begin) if nbytes else b"").ljust(PAGE_BYTES, b"\0")

    def _cut(self, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        done = 0
        while done < len(view):
            page, first = divmod(self._position + done, PAGE_BYTES)
            part = view[done : done + PAGE_BYTES - first]
            yield page, first, part
            done += len(part)
