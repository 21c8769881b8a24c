"""Prompts as datasets of an HDF5 file: the scan."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
from h5py import h5g

from mpispeed.base.plain import printable
from mpispeed.ckpt.format import kinds
from mpispeed.generation.hdf5_tables import REFERENCE, Heap, Table, Tables, child, group, names, read, shown
from mpispeed.generation.prompt_index import TEXT, TOKENS, IdSet, Index, SpanList
from mpispeed.generation.prompt_lines import check_id
from mpispeed.generation.requests import OPTIONS, PromptError, options_of
from mpispeed.native.checksum import crc32c

_BLOCK = 1 << 16
"""Elements that are read at a time."""


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
        with kinds.opened(path) as opened:
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
        self._tables, self._most_bytes = Tables(handle, size_bytes, opened), most_bytes
        self._text_bytes = 0

    def index(self, field: str, id_field: str | None, digest: str) -> Index:
        *above, name = [part for part in field.split("/") if part] or [field]
        parent = self._tables.root
        for each in above:
            parent = group(parent, each)
        found = child(parent, name)
        contents, dtype = SpanList(), ""
        if isinstance(found, h5g.GroupID):
            kind, dtype = TOKENS, self._token_prompts(found, contents)
        else:
            kind = TEXT
            for start, raw in self._texts(self._tables.table(parent, name)):
                contents.add(start, len(raw), crc32c(raw))
        spans = contents.spans()
        if not len(spans):
            msg = f"{field!r} is empty; it needs one element for each prompt"
            raise ValueError(msg)
        columns = self._columns(parent, len(spans), id_field)
        ids = self._ids(parent, len(spans), id_field, columns)
        counts = columns["n"] if "n" in columns else np.zeros(len(spans), np.int64)
        others = sorted({shown(each) for each in names(parent)} - {name, id_field, *OPTIONS})[:20]
        return Index(
            size_bytes=self._tables.size_bytes,
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

    def _token_prompts(self, found: h5g.GroupID, contents: SpanList) -> str:
        tokens = self._tables.table(found, "tokens")
        offsets = self._tables.table(found, "offsets")
        if tokens.dtype.kind not in "iu" or offsets.dtype.kind not in "iu" or offsets.count < 2:
            msg = f"tokens ({tokens.dtype}) and offsets ({offsets.dtype}, {offsets.count} elements) have to be whole "
            msg += "numbers, with one offset more than there are prompts"
            raise ValueError(msg)
        cuts = offsets.read()
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
            raw = read(self._tables.handle, start, size, "tokens")
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
            columns[id_field] = table.read()
            found = [str(number) for number in columns[id_field].tolist()]
            for name in found:
                seen.add(name)
        else:
            found = []
            for start, raw in self._texts(table):
                found.append(check_id(raw.decode()))
                seen.add(found[-1])
                spans.add(start, len(raw), crc32c(raw))
        for one, other in seen.suspects():
            if found[one] == found[other]:
                msg = f"prompts {one} and {other} have the same id {shown(found[one])!r}; ids are unique"
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
            values = table.read()
            for value in np.unique(values).tolist():
                if value == value and value >= 0:
                    options_of({name: value})
            found[name] = values
        return found

    def _counted(self, parent: h5g.GroupID, name: str, count: int) -> Table:
        table = self._tables.table(parent, name)
        if table.count != count:
            msg = f"{shown(name)} has {table.count} elements for {count} prompts"
            raise ValueError(msg)
        return table

    def _texts(self, table: Table) -> Iterator[tuple[int, bytes]]:
        """(start in the file, bytes) of each element."""
        heap = Heap(self._tables.handle, self._tables.size_bytes, table.name, self._most_bytes)
        for first in range(0, table.count, _BLOCK):
            block = table.read(first, min(table.count, first + _BLOCK))
            for place in range(len(block)):
                if table.dtype == REFERENCE:
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
        if len(raw) > self._most_bytes or self._text_bytes > self._tables.size_bytes:
            msg = f"element {place} of {name} has {len(raw)} bytes; expected at most {self._most_bytes}, and all "
            msg += "together fewer than the file has"
            raise ValueError(msg)
        try:
            raw.decode()
        except UnicodeDecodeError as failure:
            msg = f"byte {failure.start} of element {place} of {name} is no UTF-8; write texts as UTF-8"
            raise ValueError(msg) from None
