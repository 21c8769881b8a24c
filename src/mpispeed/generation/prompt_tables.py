"""Prompts as datasets of an HDF5 file: the scan.

HDF5 tells names, types and places only; elements are read from the file by position, those of variable length too:
HDF5 follows lengths and addresses of a damaged heap without end. So nothing outside of the file is opened, and nothing
is allocated on its word that it could not hold.

Source: HDF5 File Format Specification 3.0, III.E (global heap), VIII.C (types of variable length).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o, h5t

from mpispeed.base.plain import printable
from mpispeed.generation.prompt_index import TEXT, TOKENS, IdSet, Index, SpanList
from mpispeed.generation.prompt_lines import check_id
from mpispeed.generation.requests import OPTIONS, PromptError, options_of
from mpispeed.native.checksum import crc32c

MAGIC = b"\x89HDF\r\n\x1a\n"

REPACK = "write it without chunks and filters (h5repack -l CONTI -f NONE OLD NEW)"

#: element of variable length in the file: length, and address and number of an object of a global heap
_REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("number", "<u4")])
_HEAP_MAGIC = b"GCOL\x01"
_HEAP_HEAD_BYTES = _OBJECT_HEAD_BYTES = 16
_BLOCK = 1 << 16
"""Elements that are read at a time."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A dataset with one dim whose elements lie one after the other in the file.

    Attributes:
        name: for messages.
        offset: of the first, in bytes from the start of the file.
        count: of elements.
        dtype: of one in the file; references for texts of variable length.
    """

    name: str
    offset: int
    count: int
    dtype: np.dtype

    def read(self, handle: int, first: int, last: int) -> np.ndarray:
        """Elements [first, last), read without HDF5."""
        size = self.dtype.itemsize
        raw = _read(handle, self.offset + first * size, (last - first) * size, self.name)
        return np.frombuffer(raw, self.dtype)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Start and size in bytes of elements [first, last)."""
        return self.offset + first * self.dtype.itemsize, (last - first) * self.dtype.itemsize


def scan(path: Path, file: BinaryIO, field: str, id_field: str | None, most_bytes: int) -> Index:
    """Find and check all prompts.

    Raises:
        PromptError: the file has none, or not as they have to be.
    """
    file.seek(0)
    hashed, size = blake2b(digest_size=32), 0
    while block := file.read(1 << 20):
        hashed.update(block)
        size += len(block)
    try:
        with h5py.File(path, "r", locking=False) as opened:
            return _Scan(file.fileno(), size, opened, most_bytes).index(
                field, id_field, f"blake2b:{hashed.hexdigest()}"
            )
    except (OSError, ValueError, KeyError, RuntimeError, RecursionError) as failure:
        text = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure
        msg = f"{path} has no prompts that can be read: {printable(str(text), 500)}"
        raise PromptError(msg) from failure


class _Scan:
    """One file that is looked through."""

    def __init__(self, handle: int, size_bytes: int, opened: h5py.File, most_bytes: int) -> None:
        self._handle, self._size, self._most_bytes = handle, size_bytes, most_bytes
        plan = opened.id.get_create_plist()
        if plan.get_userblock() or plan.get_sizes() != (8, 8):
            msg = "it has a user block or addresses of another size than 8 bytes; write it with h5py's defaults"
            raise ValueError(msg)
        self._root: h5g.GroupID = opened["/"].id
        self._text_bytes = 0

    def index(self, field: str, id_field: str | None, digest: str) -> Index:
        *above, name = [part for part in field.split("/") if part] or [field]
        parent = self._root
        for each in above:
            parent = _group(parent, each)
        found = _child(parent, name)
        contents, dtype = SpanList(), ""
        if isinstance(found, h5g.GroupID):
            kind, dtype = TOKENS, self._token_prompts(found, contents)
        else:
            kind = TEXT
            for start, raw in self._texts(self._table(found, name)):
                contents.add(start, len(raw), crc32c(raw))
        spans = contents.spans()
        if not len(spans):
            msg = f"{field!r} is empty; it needs one element for each prompt"
            raise ValueError(msg)
        columns = self._columns(parent, len(spans), id_field)
        ids = self._ids(parent, len(spans), id_field, columns)
        counts = columns["n"] if "n" in columns else np.zeros(len(spans), np.int64)
        others = sorted({_shown(each) for each in _names(parent)} - {name, id_field, *OPTIONS})[:20]
        return Index(
            size_bytes=self._size,
            digest=digest,
            kind=kind,
            contents=spans,
            counts=np.maximum(counts, 0).astype(np.int64),
            field=field,
            id_field=id_field,
            dtype=dtype,
            ids=ids.spans() if ids is not None else None,
            columns=columns,
            ignored=tuple(others),
        )

    def _token_prompts(self, group: h5g.GroupID, contents: SpanList) -> str:
        tokens = self._table(_child(group, "tokens"), "tokens")
        offsets = self._table(_child(group, "offsets"), "offsets")
        if tokens.dtype.kind not in "iu" or offsets.dtype.kind not in "iu" or offsets.count < 2:
            msg = f"tokens ({tokens.dtype}) and offsets ({offsets.dtype}, {offsets.count} elements) have to be whole "
            msg += "numbers, with one offset more than there are prompts"
            raise ValueError(msg)
        cuts = offsets.read(self._handle, 0, offsets.count)
        # compared as they are stored: a difference of unsigned numbers would wrap around
        if (cuts[1:] < cuts[:-1]).any() or cuts[0] < 0 or int(cuts[-1]) > tokens.count:
            msg = f"the offsets have to grow from 0 to the number of tokens, which is {tokens.count}"
            raise ValueError(msg)
        cuts = cuts.astype(np.int64)
        for prompt in range(offsets.count - 1):
            start, size = tokens.span(int(cuts[prompt]), int(cuts[prompt + 1]))
            if size > self._most_bytes:
                msg = f"prompt {prompt} has {size} bytes of tokens; expected at most {self._most_bytes}"
                raise ValueError(msg)
            raw = _read(self._handle, start, size, "tokens")
            ids = np.frombuffer(raw, tokens.dtype)
            if size and (ids.min() < 0 or ids.max() >= 2**31):
                msg = f"prompt {prompt} has token ids from {ids.min()} to {ids.max()}; expected 0 to 2^31 - 1"
                raise ValueError(msg)
            contents.add(start, size, crc32c(raw))
        return tokens.dtype.str

    def _ids(
        self, parent: h5g.GroupID, count: int, id_field: str | None, columns: dict[str, np.ndarray]
    ) -> SpanList | None:
        """Places of ids that are texts; ids that are numbers join the columns."""
        if id_field is None or not parent.links.exists(id_field.encode()):
            return None
        table = self._counted(parent, id_field, count)
        seen, spans = IdSet(), SpanList()
        if table.dtype.kind in "iu":
            columns[id_field] = table.read(self._handle, 0, count)
            names = [str(number) for number in columns[id_field].tolist()]
            for name in names:
                seen.add(name)
        else:
            names = []
            for start, raw in self._texts(table):
                names.append(check_id(raw.decode()))
                seen.add(names[-1])
                spans.add(start, len(raw), crc32c(raw))
        for one, other in seen.suspects():
            if names[one] == names[other]:
                msg = f"prompts {one} and {other} have the same id {_shown(names[one])!r}; ids are unique"
                raise ValueError(msg)
        return None if table.dtype.kind in "iu" else spans

    def _columns(self, parent: h5g.GroupID, count: int, id_field: str | None) -> dict[str, np.ndarray]:
        found = {}
        for name in OPTIONS:
            if name == "stop" or name == id_field or not parent.links.exists(name.encode()):
                continue
            table = self._counted(parent, name, count)
            if table.dtype.kind not in "iuf":
                msg = f"{name} is of type {table.dtype}; expected numbers (below 0 or NaN where nothing is said)"
                raise ValueError(msg)
            values = table.read(self._handle, 0, count)
            for value in np.unique(values).tolist():
                if value == value and value >= 0:
                    options_of({name: value})
            found[name] = values
        return found

    def _counted(self, parent: h5g.GroupID, name: str, count: int) -> _Table:
        table = self._table(_child(parent, name), name)
        if table.count != count:
            msg = f"{_shown(name)} has {table.count} elements for {count} prompts"
            raise ValueError(msg)
        return table

    def _table(self, found: h5g.GroupID | h5d.DatasetID, name: str) -> _Table:
        if not isinstance(found, h5d.DatasetID):
            msg = f"{_shown(name)} is a group; expected a dataset"
            raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
        shape, kind = found.shape, found.get_type()
        if len(shape) != 1:
            msg = f"{_shown(name)} has the shape {shape}; expected one dim"
            raise ValueError(msg)
        dtype = _stored(kind)
        if dtype is None:
            msg = f"{_shown(name)} is of type {found.dtype}; expected texts or numbers"
            raise ValueError(msg)
        # There is an offset only if elements lie together in this file; properties of types of variable length are
        # not asked for, as HDF5 would read their fill value from the heap.
        offset, size_bytes = found.get_offset(), math.prod(shape) * dtype.itemsize
        if shape[0] == 0:
            return _Table(_shown(name), 0, 0, dtype)
        if offset is None:
            msg = f"the elements of {_shown(name)} are chunked, filtered, virtual, compact, elsewhere or missing; "
            msg += REPACK
            raise ValueError(msg)
        if offset + size_bytes > self._size or found.get_storage_size() != size_bytes:
            msg = f"{_shown(name)} says that it has {size_bytes} bytes, more than the file of {self._size} can hold"
            raise ValueError(msg)
        return _Table(_shown(name), int(offset), int(shape[0]), dtype)

    def _texts(self, table: _Table) -> Iterator[tuple[int, bytes]]:
        """(start in the file, bytes) of each element."""
        heap = _Heap(self._handle, self._size, table.name, self._most_bytes)
        for first in range(0, table.count, _BLOCK):
            block = table.read(self._handle, first, min(table.count, first + _BLOCK))
            for place in range(len(block)):
                if table.dtype == _REFERENCE:
                    start, raw = heap.text(*block[place].item())
                elif table.dtype.kind == "S":
                    start, raw = table.span(first + place, 0)[0], block[place].item()
                else:
                    msg = f"{table.name} is of type {table.dtype}; expected texts"
                    raise ValueError(msg)
                self._check_text(table.name, first + place, raw)
                yield start, raw

    def _check_text(self, name: str, place: int, raw: bytes) -> None:
        self._text_bytes += len(raw)
        if len(raw) > self._most_bytes or self._text_bytes > self._size:
            msg = f"element {place} of {name} has {len(raw)} bytes; expected at most {self._most_bytes}, and all "
            msg += "together fewer than the file has"
            raise ValueError(msg)
        try:
            raw.decode()
        except UnicodeDecodeError as failure:
            msg = f"byte {failure.start} of element {place} of {name} is no UTF-8; write texts as UTF-8"
            raise ValueError(msg) from None


class _Heap:
    """Objects of the global heaps of a file, read by their addresses; keeps the places of the last collection."""

    def __init__(self, handle: int, size_bytes: int, name: str, most_bytes: int) -> None:
        self._handle, self._size, self._name, self._most = handle, size_bytes, name, most_bytes
        self._address = -1
        self._raw = b""
        self._places: dict[int, tuple[int, int]] = {}

    def text(self, length: int, address: int, number: int) -> tuple[int, bytes]:
        """Start in the file and bytes of the object that an element refers to."""
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
        head = _read(self._handle, address, _HEAP_HEAD_BYTES, self._name)
        size = int.from_bytes(head[8:16], "little")
        if head[:5] != _HEAP_MAGIC or not _HEAP_HEAD_BYTES <= size <= self._size - address:
            raise self._damaged(address)
        if size > self._most + (1 << 16):
            msg = f"a text of {self._name} may have {size} bytes; expected at most {self._most}"
            raise ValueError(msg)
        self._address, self._raw = address, _read(self._handle, address, size, self._name)
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
        return _REFERENCE if kind.is_variable_str() else np.dtype(f"S{kind.get_size()}")
    if isinstance(kind, (h5t.TypeIntegerID, h5t.TypeFloatID)):
        number: np.dtype = kind.dtype
        return number if number.itemsize <= 8 else None
    return None


def _group(parent: h5g.GroupID, name: str) -> h5g.GroupID:
    found = _child(parent, name)
    if not isinstance(found, h5g.GroupID):
        msg = f"{_shown(name)} is no group"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return found


def _child(parent: h5g.GroupID, name: str) -> h5g.GroupID | h5d.DatasetID:
    """The group or dataset of this name, which has to lie in the same file."""
    raw = name.encode()
    if name in ("", ".") or "/" in name or not parent.links.exists(raw):
        has = ", ".join(map(_shown, _names(parent)[:8])) or "nothing"
        msg = f"there is no {_shown(name)!r} (there is {has}); name the dataset of texts, or the group of tokens and "
        msg += "offsets"
        raise KeyError(msg)
    if parent.links.get_info(raw).type != h5l.TYPE_HARD:
        msg = f"{_shown(name)} is a soft or external link, which is not followed; copy what it points to into the file"
        raise ValueError(msg)
    found = h5o.open(parent, raw)
    if not isinstance(found, (h5g.GroupID, h5d.DatasetID)):
        msg = f"{_shown(name)} is neither a group nor a dataset"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return found


def _names(group: h5g.GroupID) -> list[str]:
    """Names of links, at most some thousand."""
    found: list[str] = []

    def take(raw: bytes) -> bool | None:
        found.append(raw.decode(errors="replace"))
        return True if len(found) >= 4096 else None

    group.links.iterate(take)
    return found


def _read(handle: int, start: int, size: int, name: str) -> bytes:
    parts, left = [], size
    while left:
        part = os.pread(handle, left, start + size - left)
        if not part:
            msg = f"the file ends inside of {name}"
            raise ValueError(msg)
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _shown(name: str | bytes) -> str:
    return printable(name if isinstance(name, str) else name.decode(errors="replace"), 60)
