"""HDF5 objects whose bytes depend on their content only: no times, fixed library version, early allocation.

HDF5 never writes to the file system here: a `SparseImage` collects its writes.
"""

from __future__ import annotations

import functools
import io
import math
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5i, h5l, h5o, h5p, h5s, h5t

from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.sparse_image import SparseImage

_TRACKED = h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED
#: metadata is laid down in runs of this size, so that small datasets do not scatter it
_META_BLOCK_BYTES = 64 << 10
#: classes of attributes beside text; truth values are enumerations
_NUMBERS = (h5t.TypeIntegerID, h5t.TypeFloatID, h5t.TypeEnumID)
#: types of datasets
_STORED = frozenset(schema.STORAGE.values())
#: no object of a checkpoint has more; they stay in its header instead of a heap of their own
MOST_ATTRIBUTES = 64


def _no_times(kind: h5p.PropClassID) -> h5p.PropCreateID:
    properties = h5p.create(kind)
    properties.set_obj_track_times(False)
    properties.set_attr_phase_change(MOST_ATTRIBUTES, MOST_ATTRIBUTES // 2)
    return properties


def access_in_memory(image: io.RawIOBase) -> h5p.PropFAID:
    """Properties with which a file is written to `image`, always in the same version of the format."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_alignment(schema.ALIGN_THRESHOLD_BYTES, schema.ALIGN_BYTES)
    access.set_meta_block_size(_META_BLOCK_BYTES)
    # closing must not wait for groups that a caller still holds
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5fd.fileobj_driver, image)
    return access


class Objects:
    """Creates objects of an open file."""

    def __init__(self, root: h5f.FileID) -> None:
        self.root = root
        self._groups = _no_times(h5p.GROUP_CREATE)
        self._groups.set_link_creation_order(_TRACKED)
        self._datasets = _no_times(h5p.DATASET_CREATE)
        self._datasets.set_layout(h5d.CONTIGUOUS)
        self._datasets.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._datasets.set_fill_time(h5d.FILL_TIME_NEVER)
        self._links = h5p.create(h5p.LINK_CREATE)
        self._links.set_char_encoding(h5t.CSET_UTF8)
        self._scalar = h5s.create(h5s.SCALAR)
        # Created once: the cost of HDF5 is the number of objects.
        self._types: dict[np.dtype, h5t.TypeID] = {}
        self._texts: dict[int, h5t.TypeStringID] = {}
        self._spaces: dict[tuple[int, ...], h5s.SpaceID] = {(): self._scalar}

    def group(self, parent: h5g.GroupID | h5f.FileID, name: str) -> h5g.GroupID:
        """A new group; `name` is escaped already."""
        return h5g.create(parent, name.encode(), lcpl=self._links, gcpl=self._groups)

    def dataset(
        self, parent: h5g.GroupID, name: str, shape: tuple[int, ...], dtype: str, facts: Mapping[str, Any] | None = None
    ) -> int:
        """A new contiguous dataset of the dtype name `dtype`; returns its offset in the file, -1 when empty.

        `facts` become attributes.
        """
        made = self._reserved(parent, name, shape, schema.STORAGE[dtype])
        if dtype in schema.BIT_PATTERNS:
            self.attribute(made, "dtype", dtype)
        for fact, value in (facts or {}).items():
            self.attribute(made, fact, value)
        return _offset_of(made)

    def reserved(self, parent: h5g.GroupID | h5f.FileID, name: str, count: int, kind: np.dtype) -> int:
        """A new contiguous dataset of so many elements, which may be records; returns its offset in the file."""
        return _offset_of(self._reserved(parent, name, (count,), kind))

    def reserved_text(self, parent: h5g.GroupID | h5f.FileID, name: str, size: int) -> int:
        """A new dataset of one text of so many bytes, which is not written; returns its offset in the file."""
        made = h5d.create(parent, name.encode(), self._text(size), self._scalar, dcpl=self._datasets, lcpl=self._links)
        return _offset_of(made)

    def _reserved(
        self, parent: h5g.GroupID | h5f.FileID, name: str, shape: tuple[int, ...], kind: np.dtype
    ) -> h5d.DatasetID:
        stored, space = self._type(kind), self._space(shape)
        return h5d.create(parent, name.encode(), stored, space, dcpl=self._datasets, lcpl=self._links)

    def external_link(self, parent: h5g.GroupID, name: str, file: str, path: str) -> None:
        """A link to `path` in another file; `name` and `path` are escaped already, `file` is relative to this one."""
        parent.links.create_external(name.encode(), file.encode(), path.encode(), lcpl=self._links)

    def array(self, parent: h5g.GroupID, name: str, values: np.ndarray) -> h5d.DatasetID:
        """A new contiguous dataset of numbers, little endian, with its elements."""
        values = np.asarray(values, values.dtype.newbyteorder("<"), order="C")
        return self._filled(parent, name, values, self._type(values.dtype))

    def text(self, parent: h5g.GroupID, name: str, value: str) -> h5d.DatasetID:
        """A new dataset of one text of fixed length, which may be of any length but not end with NUL."""
        raw = value.encode()
        size = max(1, len(raw))
        return self._filled(parent, name, np.array(raw, dtype=f"S{size}"), self._text(size))

    def _filled(self, parent: h5g.GroupID, name: str, values: np.ndarray, kind: h5t.TypeID) -> h5d.DatasetID:
        space = self._space(values.shape)
        made = h5d.create(parent, name.encode(), kind, space, dcpl=self._datasets, lcpl=self._links)
        if values.size:
            made.write(h5s.ALL, h5s.ALL, values, mtype=kind)
        return made

    def attribute(self, owner: h5py.h5i.ObjectID, name: str, value: str | float | tuple[int, ...] | None) -> None:
        """A new attribute: text, bool, integer, float, a row of integers, or nothing."""
        if value is None:
            h5a.create(owner, name.encode(), self._type(np.dtype("<f8")), h5s.create(h5s.NULL))
            return
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


class Builder(Objects):
    """Creates the objects of one new file. Use as a context manager; leaving it puts the file on disk.

    Space of the file is reserved on the disk where that is possible, if `is_reserved`.

    Raises:
        OSError: the file exists or cannot be made.
    """

    def __init__(self, path: Path, mode: int = 0o666, *, is_reserved: bool = True) -> None:
        self._path, self._mode, self._image, self._is_reserved = path, mode, SparseImage(), is_reserved
        creation = _no_times(h5p.FILE_CREATE)
        creation.set_link_creation_order(_TRACKED)
        access = access_in_memory(self._image)
        super().__init__(h5f.create(b"image", h5f.ACC_TRUNC, fcpl=creation, fapl=access))

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.root.close()
        if kind is None:
            self._image.put(self._path, self._mode, is_reserved=self._is_reserved)


def _offset_of(dataset: h5d.DatasetID) -> int:
    offset = dataset.get_offset()
    return -1 if offset is None else int(offset)


def open_reading(path: Path | io.BytesIO | io.RawIOBase) -> h5py.File:
    """Open a file for reading without taking a lock (read-only and network file systems have none).

    Access its objects through the functions `child...` only: h5py's own access follows links to other files.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, which HDF5 would wait for.
    """
    if isinstance(path, Path) and not stat.S_ISREG(path.stat().st_mode):
        msg = "it is no ordinary file"
        raise OSError(msg)
    return h5py.File(path, "r", locking=False)


def child(parent: h5g.GroupID, name: str) -> h5g.GroupID | h5d.DatasetID:
    """The group or dataset `name` (escaped already) of `parent`, if it lies in the same file.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is a link elsewhere, stored elsewhere or larger than the file.
    """
    found = hard_child(parent, name)
    if isinstance(found, h5d.DatasetID):
        check_bytes(parent, name, found)
    return found


def hard_child(parent: h5g.GroupID, name: str) -> h5g.GroupID | h5d.DatasetID:
    """As `child`, without a check of where elements are stored.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: the name is a path, or of a link elsewhere, or of neither a group nor a dataset.
    """
    raw = name.encode()
    if "/" in name or name in ("", "."):
        msg = f"{_path(parent, name)}: {name!r} is a path and not a name"
        raise ValueError(msg)
    if not parent.links.exists(raw):
        msg = f"there is no {_path(parent, name)}"
        raise KeyError(msg)
    if parent.links.get_info(raw).type != h5l.TYPE_HARD:
        msg = f"{_path(parent, name)} is a soft or external link, which is not followed"
        raise ValueError(msg)
    found = h5o.open(parent, raw)
    if not isinstance(found, (h5g.GroupID, h5d.DatasetID)):
        msg = f"{_path(parent, name)} is neither a group nor a dataset"
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
    """As `child_dataset`, without a check of the elements' storage: for reads at their offset, not through HDF5.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is no dataset of this file.
    """
    return _as_dataset(parent, name, hard_child(parent, name))


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
    """Check that a dataset's elements are stored contiguously in this file, and need no more memory than its size.

    Raises:
        ValueError: they do not.
    """
    problem = _foreign_bytes(dataset)
    if problem:
        msg = f"{_path(parent, name)} {problem}, as nothing in a checkpoint is"
        raise ValueError(msg)


def contiguous_place(
    parent: h5g.GroupID, name: str, kinds: Collection[np.dtype], size: int
) -> tuple[int, int, np.dtype]:
    """Offset in the file, number and dtype of the elements of a dataset with one dim, for reads by position.

    Args:
        parent: group of the dataset.
        name: of the dataset.
        kinds: dtypes that it may have.
        size: of the file in bytes.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is no such dataset, or its elements are not one after the other in this file.
    """
    found, path = child_place(parent, name), _path(parent, name)
    # before the properties: for a type of variable length HDF5 would read its fill value from the heap
    if found.dtype not in kinds:
        msg = f"{path} is of type {found.dtype}; expected {' or '.join(map(str, kinds))}"
        raise ValueError(msg)
    plan: h5p.PropDCID = found.get_create_plist()
    if plan.get_layout() != h5d.CONTIGUOUS or plan.get_external_count() or plan.get_nfilters():
        msg = f"the elements of {path} are chunked, filtered, virtual, or in another file; expected contiguous ones"
        raise ValueError(msg)
    # behind the layout: for the shape of a virtual dataset HDF5 would look for other files
    if found.get_space().get_simple_extent_type() != h5s.SIMPLE or len(found.shape) != 1:
        msg = f"{path} has not one dim"
        raise ValueError(msg)
    count, nbytes = int(found.shape[0]), found.dtype.itemsize
    offset = found.get_offset() if count else 0
    if offset is None or offset + count * nbytes > size:
        msg = f"{path} says that it has {count} elements of {nbytes} bytes, and they do not lie in the file"
        raise ValueError(msg)
    return int(offset), count, found.dtype


def external_target(parent: h5g.GroupID, name: str) -> tuple[str, str] | None:
    """File and path of an external link, as stored; None for anything else."""
    raw = name.encode()
    if not parent.links.exists(raw) or parent.links.get_info(raw).type != h5l.TYPE_EXTERNAL:
        return None
    file, path = parent.links.get_val(raw)
    return file.decode(errors="replace"), path.decode(errors="replace")


def names(group: h5g.GroupID) -> list[str]:
    """Names of all links of a group, in the order of h5py; of one that is no UTF-8, something that leads nowhere."""
    found = list(h5py.Group(group)) if group.get_num_objs() else []
    return [name.decode(errors="replace") if isinstance(name, bytes) else name for name in found]


def attribute_names(owner: h5i.ObjectID, most: int = MOST_ATTRIBUTES) -> list[bytes]:
    """Names of attributes in the order of their creation or, without one, by name.

    Opening attributes by name has constant cost; by index, HDF5 sorts all of them each time.

    Raises:
        ValueError: there are more than `most`.
    """
    count = h5a.get_num_attrs(owner)
    if count > most:
        msg = f"{_path(owner, '')} has {count} attributes, and nothing in a checkpoint has more than {most}"
        raise ValueError(msg)
    found: list[bytes] = []
    if count:
        h5a.iterate(owner, lambda name, *_: found.append(name))
    return found


class Attributes(dict[str, Any]):
    """Attributes of an object by name; errors about missing or wrong ones name the object's path."""

    def __init__(self, owner: h5i.ObjectID) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, name: str) -> Any:
        msg = f"{_path(self._owner, '')} has no attribute {name!r:.80}"
        raise KeyError(msg)

    def text(self, name: str) -> str:
        """The attribute `name`, which is a text.

        Raises:
            KeyError: there is none.
            ValueError: it is no text.
        """
        value = self[name]
        if not isinstance(value, bytes):
            msg = f"the attribute {name!r:.80} of {_path(self._owner, '')} is no text but {value!r:.80}"
            raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
        return value.decode()


def attributes(owner: h5i.ObjectID, *, may_be_empty: bool = False) -> Attributes:
    """All attributes as `Builder` writes them: numbers, rows of numbers, text as bytes.

    Args:
        owner: a group or dataset.
        may_be_empty: attributes may hold nothing; they are None.

    Raises:
        ValueError: one is of another type, or says that it is larger than the file; or there are very many.
    """
    limit: int = h5i.get_file_id(owner).get_filesize()
    found = Attributes(owner)
    for raw in attribute_names(owner):
        own, name = h5a.open(owner, raw), raw.decode(errors="replace")
        kind, space = own.get_type(), own.get_space()
        dtype, is_empty = _attribute_dtype(kind), space.get_simple_extent_type() == h5s.NULL
        if is_empty and may_be_empty:
            found[name] = None
            continue
        if dtype is None or is_empty:
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
    """The numpy dtype of an attribute's stored type; None for types that no checkpoint has."""
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
    """The reason why elements are not contiguous in this file or need more memory than its size, or ""."""
    dtype = dataset.dtype
    # before the properties: to tell the fill value of a type of variable length, HDF5 reads the heap of the file
    if dtype not in _STORED and dtype.kind != "S":
        return f"is of type {dtype}"
    properties = dataset.get_create_plist()
    limit: int = h5i.get_file_id(dataset).get_filesize()
    if properties.get_layout() not in (h5d.CONTIGUOUS, h5d.COMPACT):
        return "is chunked or virtual"
    if properties.get_external_count():
        return "has its elements in another file"
    # behind the layout: for the shape of a virtual dataset HDF5 would look for other files
    if dataset.shape is None:
        return "holds nothing"
    if math.prod(dataset.shape) * dtype.itemsize > limit:
        return f"says that it has more elements ({dataset.shape}) than its file of {limit} bytes can hold"
    return ""


def read_text(parent: h5g.GroupID, name: str) -> str:
    """The text of a dataset that `Builder.text` made.

    Raises:
        KeyError: there is nothing of that name.
        ValueError: it is no such dataset of this file.
    """
    return text(h5py.Dataset(child_dataset(parent, name))[()])


def text(value: object) -> str:
    """Text of an attribute that was read as bytes or str.

    Raises:
        ValueError: it is no text.
    """
    if not isinstance(value, (bytes, str)):
        msg = f"{value!r:.80} is no text"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return value.decode() if isinstance(value, bytes) else str(value)
