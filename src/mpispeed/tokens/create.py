"""A new token store: laid out at once, filled by position from any number of processes, and completed by one of them.

places = create(path, tokens=..., documents=..., dtype="u2", facts={...})        # one process
with StoreWriter(path, places) as writer:                                        # any process, in any order
    writer.put("tokens", first, ids)
    writer.put("documents", first, begins)
# when all documents are there
    writer.put_lookup(first, stop)
# when all of these blocks is there
    writer.put_checksums("tokens", first, stop)
finish(path, places)                                                             # one process, when all are done
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5g

from mpispeed.ckpt.format.hdf5 import Builder, Objects
from mpispeed.ckpt.format.sparse_image import write_at
from mpispeed.native.checksum import crc32c
from mpispeed.tokens import layout
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.layout import Manifest, Place, Places
from mpispeed.tokens.link_room import roomy_group
from mpispeed.tokens.positions import read_bytes, read_elements

_LEAST_ROOM = 16 << 10  # of a manifest, for what is added to facts


def create(
    path: Path,
    *,
    tokens: int,
    documents: int,
    dtype: str,
    rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    is_reserved: bool = True,
) -> Places:
    """Lay out a store, which is unfinished until `finish`. For one process.

    Args:
        path: a file that is not there yet.
        tokens: N, of all documents together.
        documents: D; each has at least one token.
        dtype: of token ids, "u2" or "u4".
        rows: R, if documents are packed into rows.
        columns: dtypes ("u1" to "f8") of columns by name; others can be added to the finished store.
        facts: what the manifest will tell: tokenizer, vocabulary_size, eos, source and others, as values of JSON.
        is_reserved: reserve the space on the disk where that is possible, so that a full disk is known now.

    Raises:
        TokenStoreError: there can be no such store.
        OSError: the file exists, there is no room for it, or the file system refuses.
    """
    wanted = list(layout.table_shapes(tokens, documents, dtype, rows))
    columns = dict(columns or {})
    layout.check_columns(columns)
    layout.packed_manifest(Manifest(False, dict(facts or {})), layout.MANIFEST_BYTES - _LEAST_ROOM)
    with Builder(path, is_reserved=is_reserved) as builder:
        places = _laid_out(builder, wanted, columns, documents)
    with StoreWriter(path, places) as writer:
        writer.put_manifest("", Manifest(False, dict(facts or {}), {}, layout.sizes_of(places)))
    return places


def _laid_out(
    builder: Builder, wanted: list[tuple[str, int, str]], columns: Mapping[str, str], documents: int
) -> Places:
    root = builder.root
    builder.attribute(root, "format", layout.FORMAT)
    builder.attribute(root, "version", layout.VERSION)
    # before all else, so that its header is in the first page of the file
    group = roomy_group(root, layout.COLUMNS, layout.MOST_COLUMNS, layout.MOST_NAME_BYTES)
    checksums = builder.group(root, layout.CHECKSUMS)
    manifests = {"": (builder.reserved_text(root, layout.MANIFEST, layout.MANIFEST_BYTES), layout.MANIFEST_BYTES)}
    tables, lists = dict[str, Place](), dict[str, Place]()
    for name, count, dtype in wanted:
        tables[name] = _reserved(builder, root, name, count, dtype)
        lists[name] = _reserved(builder, checksums, name, tables[name].block_count, "u4")
    for name, dtype in columns.items():
        table = layout.column_table(name)
        tables[table], lists[table], manifests[table] = reserve_column(builder, group, name, dtype, documents)
    return Places(tables, lists, manifests)


def reserve_column(
    objects: Objects, group: h5g.GroupID, name: str, dtype: str, documents: int
) -> tuple[Place, Place, tuple[int, int]]:
    """Make the objects of a column in the group of columns; the places of its values, checksums and manifest."""
    own = objects.group(group, name)
    values = _reserved(objects, own, layout.VALUES, documents, dtype)
    sums = _reserved(objects, own, layout.CHECKSUMS, values.block_count, "u4")
    room = layout.COLUMN_MANIFEST_BYTES
    return values, sums, (objects.reserved_text(own, layout.MANIFEST, room), room)


def _reserved(builder: Objects, parent: Any, name: str, count: int, dtype: str) -> Place:
    return Place(builder.reserved(parent, name, count, np.dtype(f"<{dtype}")), count, dtype)


class StoreWriter:
    """Writes elements of a laid out store by position. Any number of processes may do so at once; use it in a with.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, places: Places) -> None:
        self.path, self.places = path, places
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def put(self, table: str, first: int, values: np.ndarray) -> None:
        """Write elements of a table ("tokens", "documents", "rows", "columns/NAME").

        Args:
            table: its name.
            first: number of the first element.
            values: one dimension; of any dtype of numbers that holds the values exactly.

        Raises:
            TokenStoreError: the table has no such elements, or its dtype does not hold the values.
            OSError: the file system refuses.
        """
        place = self.places.tables[table]
        if first < 0 or first + len(values) > place.count:
            msg = f"elements {first} to {first + len(values)} of /{table} are to be written, which has {place.count}"
            raise TokenStoreError(msg)
        stored = np.ascontiguousarray(values, place.numpy)
        if stored.dtype != values.dtype and not np.array_equal(stored, values, equal_nan=stored.dtype.kind == "f"):
            msg = (
                f"/{table} is of dtype {place.dtype}, which cannot hold all of the {values.dtype} given from {first} on"
            )
            raise TokenStoreError(msg)
        write_at(self._handle, bytes_of(stored), place.offset + first * place.itemsize)

    def put_lookup(self, first: int, stop: int) -> None:
        """Write entries of /lookup, from the whole of /documents, which is there already.

        Raises:
            TokenStoreError: documents do not increase.
            OSError: the file system refuses.
        """
        piece = 1 << 16
        for begin in range(first, stop, piece):
            end = min(stop, begin + piece)
            wanted = np.arange(begin, end, dtype=np.uint64) * np.uint64(layout.LOOKUP_TOKENS)
            self.put(layout.LOOKUP, begin, documents_at(self._handle, self.places, wanted))

    def put_checksums(self, table: str, first: int, stop: int) -> None:
        """Write the checksums of blocks of a table, which are there already.

        Raises:
            OSError: the file system refuses.
        """
        place, own = self.places.tables[table], self.places.lists[table]
        sums = np.array([block_checksum(self._handle, place, number) for number in range(first, stop)], own.numpy)
        write_at(self._handle, bytes_of(sums), own.offset + first * own.itemsize)

    def put_manifest(self, table: str, manifest: Manifest) -> None:
        """Write the manifest of the store ("") or of a column. Raises OSError."""
        offset, room = self.places.manifests[table]
        write_at(self._handle, memoryview(layout.packed_manifest(manifest, room)), offset)

    def manifest(self, table: str) -> Manifest | None:
        """The manifest as it is now. Raises TokenStoreError as `read_manifest`, OSError."""
        return layout.read_manifest(bytes(read_bytes(self._handle, *self.places.manifests[table])))

    def list_checksum(self, table: str) -> int:
        """Checksum of the checksums of a table, as they are in the file now. Raises OSError."""
        return list_checksum(self._handle, self.places.lists[table])

    def flush(self) -> None:
        """Wait until all that was written is on the disk. Raises OSError."""
        os.fsync(self._handle)

    def element(self, table: str, number: int) -> int:
        """One element of a table of integers, as it is in the file now. Raises TokenStoreError, OSError."""
        return int(read_elements(self._handle, self.places.tables[table], number, 1)[0])


def bytes_of(values: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    raw: Any = values.view(np.uint8)
    return memoryview(raw)


def block_checksum(handle: int, place: Place, number: int) -> int:
    """CRC-32C of a block as it is in the file. Raises TokenStoreError if the file ends within it, OSError."""
    return crc32c(read_bytes(handle, *place.block(number)))


def list_checksum(handle: int, own: Place) -> int:
    """CRC-32C of a whole list of checksums. Raises as `block_checksum`."""
    found = 0
    for number in range(own.block_count):
        found = crc32c(read_bytes(handle, *own.block(number)), found)
    return found


def documents_at(handle: int, places: Places, tokens: np.ndarray) -> np.ndarray:
    """The documents in which tokens lie, by bisection of /documents.

    Args:
        handle: of the file.
        places: its layout.
        tokens: increasing numbers of tokens.

    Raises:
        TokenStoreError: documents do not increase there.
        OSError: the file cannot be read.
    """
    place = places.tables[layout.DOCUMENTS]
    if not len(tokens):
        return np.empty(0, np.uint64)
    low = _last_at_most(handle, place, int(tokens[0]), 0)
    high = _last_at_most(handle, place, int(tokens[-1]), low)
    found = np.empty(len(tokens), np.uint64)
    done, begin = 0, low
    while done < len(tokens):
        if begin > high:
            msg = f"/documents is damaged: document {high} is to have token {tokens[done]}, and ends before it"
            raise TokenStoreError(msg)
        count = min(high + 1 - begin, 1 << 20) + 1  # one more, which says where the last document of the piece ends
        begins = read_elements(handle, place, begin, count)
        if not (begins[1:] > begins[:-1]).all():
            msg = f"/documents does not increase everywhere between {begin} and {begin + count}"
            raise TokenStoreError(msg)
        stop = int(np.searchsorted(tokens, begins[-1], side="left"))
        found[done:stop] = np.searchsorted(begins, tokens[done:stop], side="right") - 1 + begin
        done, begin = stop, begin + count - 1
    return found


def _last_at_most(handle: int, place: Place, token: int, low: int) -> int:
    """The last document that begins at `token` or before, by bisection from `low` on."""
    high = place.count - 1  # begins after every token
    while high - low > 1:
        middle = (low + high) // 2
        if int(read_elements(handle, place, middle, 1)[0]) <= token:
            low = middle
        else:
            high = middle
    return low


def finish(path: Path, places: Places, facts: Mapping[str, Any] | None = None) -> None:
    """Complete a store whose elements and checksums are all written. For one process, after all others are done.

    Args:
        path: of the store.
        places: as `create` returned it.
        facts: to be told beside those that `create` was given.

    Raises:
        TokenStoreError: tables do not begin and end as they must.
        OSError: the file system refuses.
    """
    with StoreWriter(path, places) as writer:
        for table, first, last in layout.ends_of(places):
            found = writer.element(table, 0), writer.element(table, places.tables[table].count - 1)
            if found != (first, last):
                msg = f"{path}: /{table} is from {found[0]} to {found[1]}; it must be from {first} to {last}"
                raise TokenStoreError(msg)
        for table in filter(layout.is_column, places.tables):
            own = {table: writer.list_checksum(table)}
            writer.put_manifest(table, Manifest(True, {}, own))
        begun = writer.manifest("")
        told = {**(begun.facts if begun else {}), **(facts or {})}
        sums = {table: writer.list_checksum(table) for table in places.lists if not layout.is_column(table)}
        manifest = Manifest(True, told, sums, layout.sizes_of(places))
        layout.packed_manifest(manifest, layout.MANIFEST_BYTES)
        writer.flush()  # the manifest says that all else is there
        writer.put_manifest("", manifest)
