"""HDF5 objects whose bytes depend on their content only: no times, fixed library version, early allocation."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5p, h5s, h5t

from mpispeed.ckpt import schema

_TRACKED = h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED
#: metadata is laid down in runs of this size, so that small datasets do not scatter it
_META_BLOCK_BYTES = 64 << 10
#: a parameter has fewer attributes than this; they stay in its header instead of a heap of their own
_COMPACT_ATTRIBUTES = 64


def _no_times(kind: h5p.PropClassID) -> h5p.PropCreateID:
    properties = h5p.create(kind)
    properties.set_obj_track_times(False)
    properties.set_attr_phase_change(_COMPACT_ATTRIBUTES, _COMPACT_ATTRIBUTES // 2)
    return properties


class Builder:
    """Creates the objects of one new file. Use as a context manager; the file is closed on leaving.

    Raises:
        OSError: the file exists or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
        access.set_alignment(schema.ALIGN_THRESHOLD_BYTES, schema.ALIGN_BYTES)
        access.set_meta_block_size(_META_BLOCK_BYTES)
        # the work folder belongs to one save; locks fail on many shared file systems
        access.set_file_locking(False, True)
        creation = _no_times(h5p.FILE_CREATE)
        creation.set_link_creation_order(_TRACKED)
        self._groups = _no_times(h5p.GROUP_CREATE)
        self._groups.set_link_creation_order(_TRACKED)
        self._datasets = _no_times(h5p.DATASET_CREATE)
        self._datasets.set_layout(h5d.CONTIGUOUS)
        self._datasets.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._datasets.set_fill_time(h5d.FILL_TIME_NEVER)
        self._links = h5p.create(h5p.LINK_CREATE)
        self._links.set_char_encoding(h5t.CSET_UTF8)
        self._scalar = h5s.create(h5s.SCALAR)
        self._types: dict[np.dtype, h5t.TypeID] = {}
        self.root = h5f.create(os.fsencode(path), h5f.ACC_EXCL, fcpl=creation, fapl=access)

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self.root.close()

    def group(self, parent: h5g.GroupID | h5f.FileID, name: str) -> h5g.GroupID:
        """A new group; `name` is escaped already."""
        return h5g.create(parent, name.encode(), lcpl=self._links, gcpl=self._groups)

    def dataset(self, parent: h5g.GroupID, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """A new contiguous dataset of the dtype name `dtype`; returns its offset in the file, -1 when empty."""
        space = h5s.create_simple(shape) if shape else self._scalar
        made = h5d.create(
            parent, name.encode(), self._type(schema.STORAGE[dtype]), space, dcpl=self._datasets, lcpl=self._links
        )
        if dtype in schema.BIT_PATTERNS:
            self.attribute(made, "dtype", dtype)
        offset = made.get_offset()
        return -1 if offset is None else int(offset)

    def attribute(self, owner: h5py.h5i.ObjectID, name: str, value: str | float | tuple[int, ...]) -> None:
        """A new attribute: text, bool, integer, float, or a row of integers."""
        if isinstance(value, str):
            text = value.encode()
            kind = h5t.C_S1.copy()
            kind.set_size(max(1, len(text)))
            kind.set_strpad(h5t.STR_NULLPAD)
            kind.set_cset(h5t.CSET_UTF8)
            made = h5a.create(owner, name.encode(), kind, self._scalar)
            made.write(np.array(text, dtype=f"S{max(1, len(text))}"), mtype=kind)
            return
        array = np.array(value, dtype=np.int64) if isinstance(value, tuple) else np.array(value)
        space = h5s.create_simple(array.shape) if array.shape else self._scalar
        made = h5a.create(owner, name.encode(), self._type(array.dtype), space)
        if array.size:
            made.write(array)

    def _type(self, dtype: np.dtype) -> h5t.TypeID:
        if dtype not in self._types:
            self._types[dtype] = h5t.py_create(dtype, logical=True)
        return self._types[dtype]


def open_reading(path: Path) -> h5py.File:
    """Open a file for reading without taking a lock (read-only and network file systems have none)."""
    return h5py.File(path, "r", locking=False)


def create_plain(path: Path) -> h5py.File:
    """A new file for ordinary h5py use, readable by HDF5 1.10."""
    return h5py.File(path, "x", libver=("v110", "v110"), locking=False)


def text(value: object) -> str:
    """Text of an attribute, whether it was read as bytes or str."""
    return value.decode() if isinstance(value, bytes) else str(value)
