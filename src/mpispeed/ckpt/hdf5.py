"""HDF5 objects whose bytes depend on their content only: no times, fixed library version, early allocation.

HDF5 never writes to the file system here: what it writes is collected in memory and put on disk by
plain writes. HDF5 cannot close a file that it failed to extend, so a full disk would leak the file
in a training run that goes on.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5i, h5l, h5o, h5p, h5s, h5t

from mpispeed.ckpt import schema
from mpispeed.native.block_file import reserve

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_TRACKED = h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED
#: metadata is laid down in runs of this size, so that small datasets do not scatter it
_META_BLOCK_BYTES = 64 << 10
#: classes of attributes beside text; truth values are enumerations
_NUMBERS = (h5t.TypeIntegerID, h5t.TypeFloatID, h5t.TypeEnumID)
#: types of datasets
_STORED = frozenset(schema.STORAGE.values())
#: granularity of files in memory
_PAGE_BYTES = 64 << 10
#: a parameter has fewer attributes than this; they stay in its header instead of a heap of their own
_COMPACT_ATTRIBUTES = 64


def _no_times(kind: h5p.PropClassID) -> h5p.PropCreateID:
    properties = h5p.create(kind)
    properties.set_obj_track_times(False)
    properties.set_attr_phase_change(_COMPACT_ATTRIBUTES, _COMPACT_ATTRIBUTES // 2)
    return properties


class SparseImage(io.RawIOBase):
    """A file in memory that keeps only the pages written to; what HDF5 sees as the file."""

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
        """Fill `buffer` from the position; what was never written reads as zeros."""
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
        """Nothing: the image is put on disk once, when it is complete."""

    def put(self, path: Path) -> None:
        """Make the file; where nothing was written space is reserved, or there are holes if it cannot be.

        Raises:
            OSError: the file exists, there is no room for it, or the file system refuses.
        """
        with path.open("xb", buffering=0) as file:
            try:
                is_reserved = reserve(file.fileno(), self._size)
            except OSError as failure:
                raise OSError(failure.errno, failure.strerror, str(path)) from None
            if not is_reserved:
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


class Builder:
    """Creates the objects of one new file. Use as a context manager; leaving it puts the file on disk.

    Raises:
        OSError: the file exists or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
        access.set_alignment(schema.ALIGN_THRESHOLD_BYTES, schema.ALIGN_BYTES)
        access.set_meta_block_size(_META_BLOCK_BYTES)
        # closing must not wait for groups that a caller still holds
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        self._path, self._image = path, SparseImage()
        access.set_fileobj_driver(h5fd.fileobj_driver, self._image)
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
        # Made once: what HDF5 costs here is the number of objects.
        self._types: dict[np.dtype, h5t.TypeID] = {}
        self._texts: dict[int, h5t.TypeStringID] = {}
        self._spaces: dict[tuple[int, ...], h5s.SpaceID] = {(): self._scalar}
        self.root = h5f.create(b"image", h5f.ACC_TRUNC, fcpl=creation, fapl=access)

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.root.close()
        if kind is None:
            self._image.put(self._path)

    def group(self, parent: h5g.GroupID | h5f.FileID, name: str) -> h5g.GroupID:
        """A new group; `name` is escaped already."""
        return h5g.create(parent, name.encode(), lcpl=self._links, gcpl=self._groups)

    def dataset(self, parent: h5g.GroupID, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """A new contiguous dataset of the dtype name `dtype`; returns its offset in the file, -1 when empty."""
        kind, space = self._type(schema.STORAGE[dtype]), self._space(shape)
        made = h5d.create(parent, name.encode(), kind, space, dcpl=self._datasets, lcpl=self._links)
        if dtype in schema.BIT_PATTERNS:
            self.attribute(made, "dtype", dtype)
        offset = made.get_offset()
        return -1 if offset is None else int(offset)

    def external_link(self, parent: h5g.GroupID, name: str, file: str, path: str) -> None:
        """A link to `path` in another file; `name` and `path` are escaped already, `file` is relative to this one."""
        parent.links.create_external(name.encode(), file.encode(), path.encode(), lcpl=self._links)

    def attribute(self, owner: h5py.h5i.ObjectID, name: str, value: str | float | tuple[int, ...]) -> None:
        """A new attribute: text, bool, integer, float, or a row of integers."""
        if isinstance(value, str):
            text = value.encode()
            kind = self._text(max(1, len(text)))
            made = h5a.create(owner, name.encode(), kind, self._scalar)
            made.write(np.array(text, dtype=f"S{max(1, len(text))}"), mtype=kind)
            return
        array = np.array(value, dtype=np.int64) if isinstance(value, tuple) else np.array(value)
        kind = self._type(array.dtype)
        made = h5a.create(owner, name.encode(), kind, self._space(array.shape))
        if array.size:
            made.write(array, mtype=kind)

    def _text(self, size: int) -> h5t.TypeStringID:
        if size not in self._texts:
            kind = h5t.C_S1.copy()
            kind.set_size(size)
            kind.set_strpad(h5t.STR_NULLPAD)
            kind.set_cset(h5t.CSET_UTF8)
            self._texts[size] = kind
        return self._texts[size]

    def _space(self, shape: tuple[int, ...]) -> h5s.SpaceID:
        if shape not in self._spaces:
            self._spaces[shape] = h5s.create_simple(shape)
        return self._spaces[shape]

    def _type(self, dtype: np.dtype) -> h5t.TypeID:
        if dtype not in self._types:
            self._types[dtype] = h5t.py_create(dtype, logical=True)
        return self._types[dtype]


def open_reading(path: Path | io.BytesIO) -> h5py.File:
    """Open a file for reading without taking a lock (read-only and network file systems have none).

    Reach its objects through `child` and its kin only: h5py's own access follows links to other files.
    """
    return h5py.File(path, "r", locking=False)


def child(parent: h5g.GroupID, name: str) -> h5g.GroupID | h5d.DatasetID:
    """The group or dataset `name` (escaped already) of `parent`, if it lies in the same file.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is a link elsewhere, stored elsewhere or larger than the file.
    """
    found = _child(parent, name)
    if isinstance(found, h5d.DatasetID):
        check_bytes(parent, name, found)
    return found


def _child(parent: h5g.GroupID, name: str) -> h5g.GroupID | h5d.DatasetID:
    raw = name.encode()
    if "/" in name or name in ("", "."):
        msg = f"{_path(parent, name)}: {name!r} is a path and not a name"
        raise ValueError(msg)
    if not parent.links.exists(raw):
        msg = f"there is no {_path(parent, name)}"
        raise KeyError(msg)
    if parent.links.get_info(raw).type != h5l.TYPE_HARD:
        msg = f"{_path(parent, name)} is a soft or external link, which a checkpoint never has"
        raise ValueError(msg)
    found = h5o.open(parent, raw)
    if not isinstance(found, (h5g.GroupID, h5d.DatasetID)):
        msg = f"{_path(parent, name)} is neither a group nor a dataset, as nothing in a checkpoint is"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return found


def child_group(parent: h5g.GroupID, name: str) -> h5g.GroupID:
    """The group `name` of `parent`.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is no group of this file.
    """
    found = child(parent, name)
    if not isinstance(found, h5g.GroupID):
        msg = f"{_path(parent, name)} is no group"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return found


def child_place(parent: h5g.GroupID, name: str) -> h5d.DatasetID:
    """The same without a look at where the elements are: for who reads them at their offset, and not by HDF5.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is no dataset of this file.
    """
    return _as_dataset(parent, name, _child(parent, name))


def child_dataset(parent: h5g.GroupID, name: str) -> h5d.DatasetID:
    """The dataset `name` of `parent`.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is no dataset of this file.
    """
    return _as_dataset(parent, name, child(parent, name))


def _as_dataset(parent: h5g.GroupID, name: str, found: h5g.GroupID | h5d.DatasetID) -> h5d.DatasetID:
    if not isinstance(found, h5d.DatasetID):
        msg = f"{_path(parent, name)} is no dataset"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return found


def check_bytes(parent: h5g.GroupID, name: str, dataset: h5d.DatasetID) -> None:
    """The elements of the dataset `name` of `parent` lie plainly in this file, and need no more memory than it has.

    Raises:
        ValueError: they do not.
    """
    problem = _foreign_bytes(dataset)
    if problem:
        msg = f"{_path(parent, name)} {problem}, as nothing in a checkpoint is"
        raise ValueError(msg)


def external_target(parent: h5g.GroupID, name: str) -> tuple[str, str] | None:
    """File and path that a link leads to, as they are written; None if it is no link to another file."""
    raw = name.encode()
    if not parent.links.exists(raw) or parent.links.get_info(raw).type != h5l.TYPE_EXTERNAL:
        return None
    file, path = parent.links.get_val(raw)
    return file.decode(errors="replace"), path.decode(errors="replace")


def names(group: h5g.GroupID) -> list[str]:
    """Names of all links of a group, in the order of h5py."""
    return list(h5py.Group(group))


def attributes(owner: h5i.ObjectID) -> dict[str, Any]:
    """All attributes as `Builder` writes them: numbers, rows of numbers, text as bytes.

    Raises:
        ValueError: one is of another type, or says that it is larger than the file.
    """
    limit: int = h5i.get_file_id(owner).get_filesize()
    found: dict[str, Any] = {}
    for index in range(h5a.get_num_attrs(owner)):
        own = h5a.open(owner, index=index)
        kind, space, name = own.get_type(), own.get_space(), own.name.decode(errors="replace")
        dtype = _attribute_dtype(kind)
        if dtype is None or space.get_simple_extent_type() == h5s.NULL:
            msg = f"{_path(owner, '')} has an attribute {name!r:.80} of a type that no attribute of a checkpoint is"
            raise ValueError(msg)
        shape = space.get_simple_extent_dims()
        if math.prod(shape) * dtype.itemsize > limit:
            msg = f"{_path(owner, '')} says that its attribute {name!r:.80} is larger than the file"
            raise ValueError(msg)
        value = np.empty(shape, dtype)
        if value.size:
            own.read(value, mtype=kind)
        found[name] = value if shape else value[()]
    return found


def _attribute_dtype(kind: h5t.TypeID) -> np.dtype | None:
    """How numpy holds an attribute of this type as it is stored; None for types that no checkpoint has."""
    # text of variable length lies elsewhere and may be many times as large as the file once it is read
    if isinstance(kind, h5t.TypeStringID):
        return None if kind.is_variable_str() else _text_dtype(kind.get_size())
    if isinstance(kind, _NUMBERS):
        number: np.dtype = kind.dtype
        return number
    return None


@functools.cache
def _text_dtype(size: int) -> np.dtype:
    return np.dtype(f"S{size}")


def _path(parent: h5g.GroupID, name: str) -> str:
    inner: bytes = h5i.get_name(parent) or b"?"
    return f"{inner.decode(errors='replace').rstrip('/')}/{name}"


def _foreign_bytes(dataset: h5d.DatasetID) -> str:
    """Why the elements do not lie plainly in this file, or need more memory than it has; "" if they do."""
    properties, dtype = dataset.get_create_plist(), dataset.dtype
    limit: int = h5i.get_file_id(dataset).get_filesize()
    if properties.get_layout() not in (h5d.CONTIGUOUS, h5d.COMPACT):
        return "is chunked or virtual"
    if properties.get_external_count():
        return "has its elements in another file"
    if dtype not in _STORED:
        return f"is of type {dtype}"
    if math.prod(dataset.shape) * dtype.itemsize > limit:
        return f"says that it has more elements ({dataset.shape}) than its file of {limit} bytes can hold"
    return ""


@contextlib.contextmanager
def create_plain(path: Path) -> Iterator[h5py.File]:
    """A new small file for ordinary h5py use, readable by HDF5 1.10; leaving the context puts it on disk.

    Raises:
        OSError: the file exists or cannot be made.
    """
    image = io.BytesIO()
    with h5py.File(image, "w", libver=("v110", "v110")) as file:
        yield file
    with path.open("xb") as target:
        target.write(image.getbuffer())


def write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, however the system cuts it.

    Raises:
        OSError: the file system refuses.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], offset + done)


def text(value: object) -> str:
    """Text of an attribute, whether it was read as bytes or str.

    Raises:
        ValueError: it is no text.
    """
    if not isinstance(value, (bytes, str)):
        msg = f"{value!r:.80} is no text"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return value.decode() if isinstance(value, bytes) else str(value)
