"""A column is added to a finished store so that a kill at any instant leaves it without the column or with all of it.

HDF5 makes the new objects in an `Overlay`, which shows the changes that it would make: new bytes behind the end of
the file, and in what was there a new end in the superblock and a new link in the header of /columns. A store is laid
out so that both are in its first 4096 bytes (`link_room`). So values, checksums and new objects are written behind
the end first, where nobody looks, and reach the disk; then one write of 4096 bytes makes them part of the file. The
kernel does not stop a write within a page, even for SIGKILL. What an earlier try has left behind the end is
overwritten.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5f, h5g

from mpispeed.ckpt.format.hdf5 import Objects, access_in_memory
from mpispeed.ckpt.format.sparse_image import write_at
from mpispeed.tokens import layout, reader
from mpispeed.tokens.create import block_checksum, bytes_of, list_checksum, reserve_column
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.layout import Manifest, Place
from mpispeed.tokens.overlay import PAGE_BYTES, Overlay

_SUPERBLOCK = struct.Struct("<8s4B3Q")
"""Signature; version, bytes of addresses and of lengths, flags; base, extension, end of the file."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def add_column(
    path: Path,
    name: str,
    values: np.ndarray | Iterable[np.ndarray],
    *,
    dtype: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Add a column to a finished store. For one process at a time; others may read the store meanwhile.

    Args:
        path: of the store.
        name: of the column.
        values: one for each document, in their order; an array, or arrays one after the other.
        dtype: "u1" to "f8"; by default that of the array.
        facts: what the manifest of the column is to tell, as values of JSON.

    Raises:
        TokenStoreError: there is such a column, the values are not one for each document or do not fit the dtype, or
            another program adds a column now.
        OSError: the file system refuses; the store is as it was.
    """
    pieces = [values] if isinstance(values, np.ndarray) else values
    if dtype is None:
        if not isinstance(values, np.ndarray):
            msg = f"the column {name!r:.80} needs a dtype, since its values come in pieces"
            raise TokenStoreError(msg)
        dtype = values.dtype.str[1:]
    layout.check_columns({name: dtype})
    told = Manifest(True, dict(facts or {}), {layout.column_table(name): 0})
    layout.packed_manifest(told, layout.COLUMN_MANIFEST_BYTES)  # there is room for it
    handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _lock(path, handle)
        found = reader.read_contents(path, handle)
        if name in found.places.columns:
            msg = f"{path} has a column {name} already; give the new one another name"
            raise TokenStoreError(msg)
        if len(found.places.columns) >= layout.MOST_COLUMNS:
            msg = f"{path} has {layout.MOST_COLUMNS} columns, and there is no room for more"
            raise TokenStoreError(msg)
        _add(path, handle, name, dtype, pieces, dict(facts or {}), found.places.document_count)
    finally:
        os.close(handle)  # with its lock


def _lock(path: Path, handle: int) -> None:
    """Keep other programs of this kind off, where the file system has locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failure:
        if failure.errno in (errno.EWOULDBLOCK, errno.EACCES):
            msg = f"another program adds a column to {path} now; try again when it has ended"
            raise TokenStoreError(msg) from failure
        if failure.errno not in _NO_LOCKS:
            raise


def _add(
    path: Path, handle: int, name: str, dtype: str, pieces: Iterable[np.ndarray], facts: dict[str, Any], documents: int
) -> None:
    end = _end_of(path, handle)
    overlay = Overlay(handle, end)
    values, sums, manifest = _made(overlay, name, dtype, documents)
    first, behind = _parted(path, overlay, end)
    try:
        os.ftruncate(handle, overlay.size)
        for offset, data in behind:
            write_at(handle, memoryview(data), offset)
        _write_values(handle, values, name, pieces)
        blocks = [block_checksum(handle, values, number) for number in range(values.block_count)]
        write_at(handle, bytes_of(np.array(blocks, sums.numpy)), sums.offset)
        told = Manifest(True, facts, {layout.column_table(name): list_checksum(handle, sums)})
        write_at(handle, memoryview(layout.packed_manifest(told, manifest[1])), manifest[0])
        os.fsync(handle)
    except BaseException:
        os.ftruncate(handle, end)  # give the space back
        raise
    write_at(handle, memoryview(first), 0)
    os.fsync(handle)


def _end_of(path: Path, handle: int) -> int:
    """The end of the file as HDF5 knows it; what lies behind belongs to nothing."""
    signature, version, _, _, _, base, _, end = _SUPERBLOCK.unpack(os.pread(handle, _SUPERBLOCK.size, 0))
    size = os.fstat(handle).st_size
    if signature != b"\x89HDF\r\n\x1a\n" or version not in (2, 3) or base or not PAGE_BYTES <= end <= size:
        msg = f"{path} cannot take columns: its superblock is {version}, its end {end} of {size} bytes; build it again"
        raise TokenStoreError(msg)
    return int(end)


def _made(overlay: Overlay, name: str, dtype: str, documents: int) -> tuple[Place, Place, tuple[int, int]]:
    objects = Objects(h5f.open(b"image", h5f.ACC_RDWR, fapl=access_in_memory(overlay)))
    try:
        group = h5g.open(objects.root, layout.COLUMNS.encode())
        return reserve_column(objects, group, name, dtype, documents)
    finally:
        objects.root.close()


def _parted(path: Path, overlay: Overlay, end: int) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The first bytes of the file as they are to be, and what is written behind its end."""
    changed = overlay.changed()
    inside = [(offset, data) for offset, data in changed if offset < end]
    if [offset for offset, _ in inside] != [0]:
        msg = f"{path} has no room for another column in its first {PAGE_BYTES} bytes; build it again with the column"
        raise TokenStoreError(msg)
    return inside[0][1], [(offset, data) for offset, data in changed if offset >= end]


def _write_values(handle: int, place: Place, name: str, pieces: Iterable[np.ndarray]) -> None:
    done = 0
    for piece in pieces:
        stored = np.ascontiguousarray(piece, place.numpy)
        if stored.ndim != 1 or done + len(stored) > place.count:
            msg = f"the column {name} has more than the {place.count} values that it must have, one for each document"
            raise TokenStoreError(msg)
        if not np.array_equal(stored, piece, equal_nan=stored.dtype.kind == "f"):
            msg = f"the column {name} is of dtype {place.dtype}, which cannot hold its {piece.dtype} from {done} on"
            raise TokenStoreError(msg)
        write_at(handle, bytes_of(stored), place.offset + done * place.itemsize)
        done += len(stored)
    if done != place.count:
        msg = f"the column {name} has {done} values; it must have {place.count}, one for each document"
        raise TokenStoreError(msg)
