"""The layout of a store that somebody else wrote, maybe with intent; every number is checked before it is used.

HDF5 tells names, types and places only. Nothing outside of the file is opened, no filter is loaded, and elements are
read by position after their number is compared with the size of the file.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5s

from mpispeed.base.plain import printable
from mpispeed.ckpt.format import hdf5, kinds
from mpispeed.tokens import layout
from mpispeed.tokens.errors import NoTokenStore, TokenStoreError, UnfinishedStore
from mpispeed.tokens.layout import Manifest, Place, Places
from mpispeed.tokens.overlay import PAGE_BYTES, Overlay
from mpispeed.tokens.positions import read_bytes

log = logging.getLogger(__name__)

_MAGIC = b"\x89HDF\r\n\x1a\n"
_MOST_FORMAT_BYTES = 1024
_MOST_COLUMN_LINKS = 64
_AGAIN_SECONDS = 0.02
_FAULTS = (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError, OverflowError, MemoryError)
"""What HDF5 and numpy raise for files that are not what they say."""


@dataclass(frozen=True)
class Contents:
    """Places and manifests of a store.

    Attributes:
        places: where everything lies.
        manifest: that of the store.
        columns: manifests of columns by the names of their tables.
    """

    places: Places
    manifest: Manifest
    columns: Mapping[str, Manifest]


def open_file(path: Path) -> int:
    """Descriptor of an ordinary file that begins as HDF5 does, for reading.

    Raises:
        NoTokenStore: there is none.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failure:
        msg = f"{path} is no token store that can be read: {failure.strerror}"
        raise NoTokenStore(msg) from failure
    try:
        _check_file(path, handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check_file(path: Path, handle: int) -> None:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        msg = f"{path} is no ordinary file and so no token store"
        raise NoTokenStore(msg)
    if os.pread(handle, len(_MAGIC), 0) != _MAGIC:
        msg = f"{path} is no HDF5 file and so no token store"
        raise NoTokenStore(msg)


def read_contents(path: Path, handle: int, *, is_finished: bool = True) -> Contents:
    """What an open file has.

    Args:
        path: for messages.
        handle: the file; HDF5 reads it by this descriptor and opens nothing.
        is_finished: an unfinished store is refused.

    Raises:
        NoTokenStore: it is something else.
        UnfinishedStore: its writer has not come to the end.
        TokenStoreError: it is damaged, or of a later version.
    """
    try:
        return _read_once(path, handle, is_finished)
    except (NoTokenStore, UnfinishedStore):
        raise
    except TokenStoreError:
        time.sleep(_AGAIN_SECONDS)  # maybe a column was added just now
        return _read_once(path, handle, is_finished)


def contents_of(path: Path) -> Contents:
    """What a finished store has. Raises as `open_file` and `read_contents`."""
    handle = open_file(path)
    try:
        return read_contents(path, handle)
    finally:
        os.close(handle)


def _read_once(path: Path, handle: int, is_finished: bool) -> Contents:
    try:
        first = os.pread(handle, PAGE_BYTES, 0)  # a column may be added meanwhile, which changes this page at once
        size = os.fstat(handle).st_size
        view = Overlay(handle, size)
        view.write(first)
        with hdf5.open_reading(view) as file:
            return _read(path, handle, size, file, is_finished)
    except (NoTokenStore, UnfinishedStore):
        raise
    except _FAULTS as failure:
        msg = f"{path} cannot be read as a token store: {said(failure)}"
        raise TokenStoreError(msg) from failure


def said(failure: BaseException) -> str:
    """The text of what was raised for a file, for one line."""
    text = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure
    return printable(str(text) or type(failure).__name__, 300)


def _read(path: Path, handle: int, size: int, file: Any, is_finished: bool) -> Contents:
    _check_format(path, file.id)
    root: h5g.GroupID = file["/"].id
    manifests = {"": _text_place(root, layout.MANIFEST, layout.MANIFEST_BYTES, size)}
    manifest = layout.read_manifest(bytes(read_bytes(handle, *manifests[""])))
    if manifest is None or (is_finished and not manifest.is_complete):
        msg = (
            f"{path} is an unfinished token store: the program that writes it runs still, or was ended; start the same "
            "`mpispeed data build` again, which goes on"
        )
        raise UnfinishedStore(msg)
    tables, lists = _tables(root, manifest, size)
    group = hdf5.child_group(root, layout.COLUMNS)
    columns: dict[str, Manifest] = {}
    for name in _column_names(group):
        table, own = layout.column_table(name), hdf5.child_group(group, name)
        tables[table] = _place(own, layout.VALUES, layout.COLUMN_DTYPES, size, tables[layout.DOCUMENTS].count - 1)
        lists[table] = _place(own, layout.CHECKSUMS, ("u4",), size, tables[table].block_count)
        manifests[table] = _text_place(own, layout.MANIFEST, layout.COLUMN_MANIFEST_BYTES, size)
        found = layout.read_manifest(bytes(read_bytes(handle, *manifests[table])))
        if found is None or (is_finished and not found.is_complete):
            msg = f"the column {name} is unfinished"
            raise ValueError(msg)
        columns[table] = found
    return Contents(Places(tables, lists, manifests), manifest, columns)


def _check_format(path: Path, root: h5f.FileID) -> None:
    form = ""
    if h5a.exists(root, b"format"):
        kind = h5a.open(root, b"format").get_type()
        if not getattr(kind, "is_variable_str", lambda: True)() and kind.get_size() <= _MOST_FORMAT_BYTES:
            form = hdf5.attributes(root).text("format")
    if form != layout.FORMAT:
        what = f"its format is {form!r:.60}" if form else "it does not say what it is"
        msg = f"{path} is an HDF5 file, but no token store: {what}"
        raise NoTokenStore(msg)
    version, known = kinds.version_of(hdf5.attributes(root)), (layout.VERSION, 0)
    if why := kinds.refusal(version, known):
        msg = f"it is {why}"
        raise ValueError(msg)
    if version and (warning := kinds.warning(version, known)):
        log.warning("%s is a token store %s", path, warning)
    plan = root.get_create_plist()
    if plan.get_userblock() or plan.get_sizes() != (8, 8):
        msg = "it has a user block or addresses of another size than 8 bytes"
        raise ValueError(msg)


def _tables(root: h5g.GroupID, manifest: Manifest, size: int) -> tuple[dict[str, Place], dict[str, Place]]:
    """All tables but columns, and their lists of checksums; of the sizes that the manifest gives."""
    sizes = manifest.sizes
    numbers: list[Any] = [sizes.get(name) for name in ("tokens", "documents", "block_bytes", "lookup_tokens")]
    rows = sizes.get("rows")
    if not all(type(number) is int for number in numbers) or not (rows is None or type(rows) is int):
        msg = "its manifest does not say how much there is"
        raise ValueError(msg)
    if numbers[2:] != [layout.BLOCK_BYTES, layout.LOOKUP_TOKENS]:
        msg = (
            f"its checksums are of {numbers[2]!r:.20} bytes, its lookup of {numbers[3]!r:.20} tokens: not this version"
        )
        raise ValueError(msg)
    tables, lists = dict[str, Place](), dict[str, Place]()
    checksums = hdf5.child_group(root, layout.CHECKSUMS)
    for name, count, dtype in layout.table_shapes(numbers[0], numbers[1], str(sizes.get("dtype")), rows):
        tables[name] = _place(root, name, (dtype,), size, count)
        lists[name] = _place(checksums, name, ("u4",), size, tables[name].block_count)
    if manifest.is_complete and set(manifest.lists) != set(tables):
        msg = "its manifest has not a checksum for each table"
        raise ValueError(msg)
    return tables, lists


def _place(parent: h5g.GroupID, name: str, dtypes: tuple[str, ...], size: int, wanted: int) -> Place:
    kinds = {np.dtype(f"<{dtype}"): dtype for dtype in dtypes}
    offset, count, kind = hdf5.contiguous_place(parent, name, kinds, size)
    if count != wanted:
        msg = f"/{name} has {count} elements; it must have {wanted}"
        raise ValueError(msg)
    return Place(offset, count, kinds[kind])


def _text_place(parent: h5g.GroupID, name: str, wanted: int, size: int) -> tuple[int, int]:
    found = hdf5.child_place(parent, name)
    is_scalar = found.get_space().get_simple_extent_type() == h5s.SCALAR
    # the type first: of one of variable length HDF5 would read the heap
    if not is_scalar or found.dtype != np.dtype(f"S{wanted}"):
        msg = f"/{name} is no text of {wanted} bytes"
        raise ValueError(msg)
    plan, offset = found.get_create_plist(), found.get_offset()
    if plan.get_layout() != h5d.CONTIGUOUS or plan.get_external_count() or offset is None or offset + wanted > size:
        msg = f"the text of /{name} does not lie in the file"
        raise ValueError(msg)
    return int(offset), wanted


def _column_names(group: h5g.GroupID) -> list[str]:
    if group.get_num_objs() > _MOST_COLUMN_LINKS:
        msg = f"it has {group.get_num_objs()} columns; there can be {layout.MOST_COLUMNS}"
        raise ValueError(msg)
    names = sorted(hdf5.names(group))
    layout.check_columns(dict.fromkeys(names, "u1"))
    return names
