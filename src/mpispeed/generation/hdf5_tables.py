"""Datasets of an HDF5 file that somebody else wrote, read without trust.

HDF5 tells names, types and places only; elements are read from the file by position, those of variable length too:
HDF5 follows lengths and addresses of a damaged heap without end. So nothing outside of the file is opened, and nothing
is allocated on its word that it could not hold.

Source: HDF5 File Format Specification 3.0, III.E (global heap), VIII.C (types of variable length).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import h5py
import numpy as np
from h5py import h5d, h5g, h5t

from mpispeed.base.plain import printable
from mpispeed.ckpt.format.hdf5 import hard_child

MAGIC = b"\x89HDF\r\n\x1a\n"
"""First bytes of a file."""

REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
"""Element of variable length in the file: length, and address and number of an object of a global heap."""

_REPACK = "write it without chunks and filters (h5repack -l CONTI -f NONE OLD NEW)"
_HEAP_MAGIC = b"GCOL\x01"
_HEAP_HEAD_BYTES = _OBJECT_HEAD_BYTES = 16
_MOST_NAMES = 4096


@dataclass(frozen=True, slots=True)
class Table:
    """A dataset with one dim whose elements lie one after the other in the file.

    Attributes:
        handle: of the file.
        name: for messages.
        offset: of the first element, in bytes from the start of the file.
        count: of elements.
        dtype: of one in the file; `REFERENCE` for texts of variable length.
    """

    handle: int
    name: str
    offset: int
    count: int
    dtype: np.dtype

    def read(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Elements [first, last), read without HDF5.

        Raises:
            ValueError: the file ends before.
            OSError: it cannot be read.
        """
        start, size = self.span(first, self.count if last is None else last)
        return np.frombuffer(read(self.handle, start, size, self.name), self.dtype)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Start and size in bytes of elements [first, last)."""
        return self.offset + first * self.dtype.itemsize, (last - first) * self.dtype.itemsize


class Tables:
    """The tables of one open file.

    Args:
        handle: of the file, for reads by position.
        size_bytes: of the file.
        opened: the same file.

    Raises:
        ValueError: its addresses are not of the usual kind.
    """

    def __init__(self, handle: int, size_bytes: int, opened: h5py.File) -> None:
        self.handle, self.size_bytes = handle, size_bytes
        plan = opened.id.get_create_plist()
        if plan.get_userblock() or plan.get_sizes() != (8, 8):
            msg = "it has a user block or addresses of another size than 8 bytes; write it with h5py's defaults"
            raise ValueError(msg)
        self.root: h5g.GroupID = opened["/"].id

    def table(self, parent: h5g.GroupID, name: str) -> Table:
        """The dataset `name` of a group.

        Raises:
            KeyError: there is nothing of that name.
            ValueError: it is none of numbers or texts whose elements lie together in this file.
        """
        return self._checked(child(parent, name), name)

    def _checked(self, found: h5g.GroupID | h5d.DatasetID, name: str) -> Table:
        if not isinstance(found, h5d.DatasetID):
            msg = f"{shown(name)} is a group; expected a dataset"
            raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
        shape, kind = found.shape, found.get_type()
        if len(shape) != 1:
            msg = f"{shown(name)} has the shape {shape}; expected one dim"
            raise ValueError(msg)
        dtype = _stored(kind)
        if dtype is None:
            msg = f"{shown(name)} is of type {found.dtype}; expected texts or numbers"
            raise ValueError(msg)
        # There is an offset only if elements lie together in this file; properties of types of variable length are
        # not asked for, as HDF5 would read their fill value from the heap.
        offset, size_bytes = found.get_offset(), math.prod(shape) * dtype.itemsize
        if shape[0] == 0:
            return Table(self.handle, shown(name), 0, 0, dtype)
        if offset is None:
            msg = f"the elements of {shown(name)} are chunked, filtered, virtual, compact, elsewhere or missing; "
            msg += _REPACK
            raise ValueError(msg)
        if offset + size_bytes > self.size_bytes or found.get_storage_size() != size_bytes:
            msg = f"{shown(name)} says that it has {size_bytes} bytes, more than the file of {self.size_bytes} can hold"
            raise ValueError(msg)
        return Table(self.handle, shown(name), int(offset), int(shape[0]), dtype)


class Heap:
    """Objects of the global heaps of a file, read by their addresses; keeps the last collection.

    Args:
        handle: of the file.
        size_bytes: of the file.
        name: of the table, for messages.
        most_bytes: longer texts are refused.
    """

    def __init__(self, handle: int, size_bytes: int, name: str, most_bytes: int) -> None:
        self._handle, self._size, self._name, self._most = handle, size_bytes, name, most_bytes
        self._address = -1
        self._raw = b""
        self._places: dict[int, tuple[int, int]] = {}

    def text(self, length: int, address: int, number: int) -> tuple[int, bytes]:
        """Start in the file and bytes of the object that an element refers to.

        Raises:
            ValueError: there is none.
        """
        if length == 0:
            return 0, b""
        if address != self._address:
            self._open(address)
        start, size = self._places.get(number, (0, -1))
        if length > size:
            raise self._damaged(address)
        return address + start, self._raw[start : start + length]

    def _open(self, address: int) -> None:
        if not 0 < address <= self._size - _HEAP_HEAD_BYTES:
            raise self._damaged(address)
        head = read(self._handle, address, _HEAP_HEAD_BYTES, self._name)
        size = int.from_bytes(head[8:16], "little")
        if head[:5] != _HEAP_MAGIC or not _HEAP_HEAD_BYTES <= size <= self._size - address:
            raise self._damaged(address)
        if size > self._most + (1 << 16):
            msg = f"a text of {self._name} may have {size} bytes; expected at most {self._most}"
            raise ValueError(msg)
        self._address, self._raw = address, read(self._handle, address, size, self._name)
        self._places = {}
        place = _HEAP_HEAD_BYTES
        while place + _OBJECT_HEAD_BYTES <= size:
            number = int.from_bytes(self._raw[place : place + 2], "little")
            length = int.from_bytes(self._raw[place + 8 : place + 16], "little")
            if number == 0:  # the free space, which is the last
                break
            if length > size - place - _OBJECT_HEAD_BYTES:
                raise self._damaged(address)
            self._places[number] = (place + _OBJECT_HEAD_BYTES, length)
            place += _OBJECT_HEAD_BYTES + -(-length // 8) * 8

    def _damaged(self, address: int) -> ValueError:
        return ValueError(f"the heap at byte {address}, which has texts of {self._name}, is damaged")


def _stored(kind: h5t.TypeID) -> np.dtype | None:
    """The numpy dtype of an element in the file; None for types that no prompt has."""
    if isinstance(kind, h5t.TypeStringID):
        return REFERENCE if kind.is_variable_str() else np.dtype(f"S{kind.get_size()}")
    if isinstance(kind, h5t.TypeEnumID):
        return _stored(kind.get_super())
    if isinstance(kind, (h5t.TypeIntegerID, h5t.TypeFloatID)):
        number: np.dtype = kind.dtype
        return number if number.itemsize <= 8 else None
    return None


def group(parent: h5g.GroupID, name: str) -> h5g.GroupID:
    """The group `name` of a group. Raises as `child`, and a ValueError where it is none."""
    found = child(parent, name)
    if not isinstance(found, h5g.GroupID):
        msg = f"{shown(name)} is no group"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return found


def child(parent: h5g.GroupID, name: str) -> h5g.GroupID | h5d.DatasetID:
    """The group or dataset of this name, which has to lie in the same file.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is a link, or something else.
    """
    try:
        return hard_child(parent, name)
    except KeyError:
        has = ", ".join(map(shown, names(parent)[:8])) or "nothing"
        msg = f"there is no {shown(name)!r} (there is {has}); name the dataset of texts, or the group of tokens and "
        msg += "offsets"
        raise KeyError(msg) from None


def names(group: h5g.GroupID) -> list[str]:
    """Names of links, at most some thousand of them."""
    found: list[str] = []

    def take(raw: bytes) -> bool | None:
        found.append(raw.decode(errors="replace"))
        return True if len(found) >= _MOST_NAMES else None

    group.links.iterate(take)
    return found


def read(handle: int, start: int, size: int, name: str) -> bytes:
    """Bytes of a file.

    Raises:
        ValueError: it ends before; `name` says inside of what.
        OSError: it cannot be read.
    """
    parts, left = [], size
    while left:
        part = os.pread(handle, left, start + size - left)
        if not part:
            msg = f"the file ends inside of {name}"
            raise ValueError(msg)
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def shown(name: str | bytes) -> str:
    """A name of the file on one line."""
    return printable(name if isinstance(name, str) else name.decode(errors="replace"), 60)
