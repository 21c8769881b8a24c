"""Memory-mapped files: bytes are read when they are used."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import torch

Extent = tuple[str, int, int]
"""A file, its first byte, one past the last."""


class Notes:
    """Places of tensors that were mapped while the notes were taken, and checksums that were not compared yet.

    Attributes:
        sums: range of a file -> CRC-32 of its bytes.
    """

    def __init__(self) -> None:
        self.sums: dict[Extent, int] = {}
        self._starts: list[int] = []
        self._maps: dict[int, tuple[torch.Tensor, str]] = {}
        self._unread: dict[int, tuple[torch.Tensor, str, int]] = {}

    def add(self, content: torch.Tensor, path: Path) -> None:
        """Note a mapped file, which is kept."""
        bisect.insort(self._starts, content.data_ptr())
        self._maps[content.data_ptr()] = content, str(path)

    def stand_in(self, part: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor without memory for bytes that are not aligned for their elements, and are not copied therefore."""
        path, first = self.place(part) or ("", 0)
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._unread[id(made)] = made, path, first
        return made

    def place(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """The file that has the elements of a tensor, and the byte of the first one; None if it is in memory."""
        if id(tensor) in self._unread:
            _, path, first = self._unread[id(tensor)]
            return path, first
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if tensor.is_meta or at < 0:
            return None
        content, path = self._maps[self._starts[at]]
        first = address - content.data_ptr()
        return (path, first) if first < content.numel() else None


_NOTES: ContextVar[Notes | None] = ContextVar("notes of mapped files", default=None)


@contextlib.contextmanager
def noted() -> Iterator[Notes]:
    """Context in which the places of tensors in files are noted, and checksums of their bytes are left to the caller.

    Tensors without memory stand for unaligned ones in safetensors files.
    """
    notes = Notes()
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def current_notes() -> Notes | None:
    """The notes that are being taken, if any."""
    return _NOTES.get()


def map_file(path: Path) -> torch.Tensor:
    """The bytes of a file, mapped copy-on-write."""
    if not path.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    content = torch.from_numpy(np.memmap(path, np.uint8, "c"))
    notes = current_notes()
    if notes is not None:
        notes.add(content, path)
    return content


def is_aligned(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if the bytes are aligned for elements of `dtype`."""
    return part.storage_offset() % dtype.itemsize == 0 and part.data_ptr() % dtype.itemsize == 0


def typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as elements; unaligned ones are copied.

    Raises:
        ValueError: a bool is stored as another byte than 0 or 1.
    """
    if dtype == torch.bool and part.numel() and int(part.max()) > 1:
        msg = f"a truth value is stored as {int(part.max())}, not as 0 or 1"
        raise ValueError(msg)
    if not is_aligned(part, dtype):
        part = part.clone()
    return part.view(dtype)
