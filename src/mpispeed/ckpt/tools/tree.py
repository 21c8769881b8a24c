"""`ckpt tree` and `h5 show`: the HDF5 objects of files, as `h5ls -r` would list them; follows no link. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5a, h5d, h5g, h5i, h5l, h5o, h5p, h5s, h5t

from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes
from mpispeed.ckpt.format import hdf5, kinds, schema, tags
from mpispeed.ckpt.format.index import translated
from mpispeed.ckpt.tools.show import split_location

#: attributes that are longer are not read
_LONGEST_BYTES = 64 << 10
#: of an object with more only the number is told
_MOST_ATTRIBUTES = 10_000
#: of what a file says, on one line
_MOST_SIGNS = 160
#: groups in groups; what lies deeper is not shown
_MOST_DEPTH = 100
#: objects of a file; what is behind is not shown
_MOST_ROWS = 1_000_000
#: names of other files that are told of one dataset
_MOST_SOURCES = 16
_LAYOUTS = {h5d.CONTIGUOUS: "contiguous", h5d.CHUNKED: "chunked", h5d.COMPACT: "compact", h5d.VIRTUAL: "virtual"}
#: what HDF5 raises for parts of a file that it cannot make sense of
_FAULTS = (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError, RecursionError)


def rows(location: str) -> list[dict[str, Any]]:
    """One row per object of model.h5, the data files and state.h5, as far as they are there.

    Nothing is checked: this also shows what a damaged or unfinished checkpoint has.

    Args:
        location: "DIR" (its latest), "DIR:tag", a tag's own folder, or one HDF5 file.

    Returns:
        Rows of `rows_of`.

    Raises:
        NoCheckpoint: no tag was given and there is no `latest`.
        TagNotFound: there is no such tag.
        CorruptCheckpoint: HDF5 cannot make sense of a file.
    """
    if Path(location).is_file():
        return list(rows_of(Path(location)))
    path, _ = tags.resolve(*split_location(location))
    data = sorted((path / schema.DATA_FOLDER).glob("*.h5"))
    files = [path / schema.MODEL_FILE, *data, path / schema.STATE_FILE]
    return [row for file in files if file.exists() for row in rows_of(file, file.relative_to(path).as_posix())]


def rows_of(path: Path, name: str | None = None) -> Iterator[dict[str, Any]]:
    """One row per object of any HDF5 file; no link is followed, no element read, and no other file opened.

    Args:
        path: of the file.
        name: of the file in the rows; its last part by default.

    Returns:
        Rows with the keys file, path, kind ("group", "dataset", "type", "soft link", "external link", "unknown link",
        "same as" an object that was listed, "unreadable" with the reason as target, or "not shown"), target (of
        links), shape, type, layout ("contiguous", "chunked", "compact", "virtual", "external": elements in other
        files; None where HDF5 would have to read texts to tell), sources (files that a virtual or external dataset
        names), filters, offset, bytes (of datasets) and attributes.

    Raises:
        CorruptCheckpoint: HDF5 cannot make sense of the file.
    """
    with translated(path), kinds.opened(path) as file:
        shown = path.name if name is None else name
        for number, row in enumerate(_walk(h5g.open(file.id, b"/"))):
            if number >= _MOST_ROWS:
                yield _row(shown, row["path"], "not shown", target=f"the file has more than {_MOST_ROWS} objects")
                return
            yield _row(shown, **row)


def text_of(row: Mapping[str, Any]) -> str:
    """An object of `rows` in words, on one line without control characters."""
    kind, target = row["kind"], printable(str(row["target"]), _MOST_SIGNS)
    if kind in ("unreadable", "not shown"):
        return f"{kind}: {target}"
    if row["target"] is not None:
        return f"{kind} {target}" if kind == "same as" else f"{kind} -> {target} (not followed)"
    if kind != "dataset":
        return str(kind)
    shape = "nothing" if row["shape"] is None else "x".join(map(str, row["shape"])) or "scalar"
    stored, meant = printable(str(row["type"]), _MOST_SIGNS), row["attributes"].get("dtype")
    parts = [f"dataset {shape} {stored}"]
    if isinstance(meant, str) and meant in schema.BIT_PATTERNS:
        parts[0] += f" (bits of {meant})"
    if row["layout"] not in (None, "contiguous"):
        parts.append(row["layout"])
    if row["filters"]:
        parts.append(f"filtered by {', '.join(printable(name, 40) for name in row['filters'])}")
    if row["sources"]:
        parts.append(f"elements in {', '.join(printable(name, 80) for name in row['sources'])} (not followed)")
    if row["bytes"] is not None:
        parts.append(format_bytes(row["bytes"]))
    if row["offset"] is not None:
        parts.append(f"at byte {row['offset']}")
    return ", ".join(parts)


def _row(file: str, path: str, kind: str, **more: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "target": None,
        "shape": None,
        "type": None,
        "layout": None,
        "sources": [],
        "filters": [],
        "offset": None,
        "bytes": None,
        "attributes": {},
    }
    return {"file": file, "path": path, "kind": kind, **empty, **more}


def _walk(top: h5g.GroupID) -> Iterator[dict[str, Any]]:
    """The objects below `top`, parents before children; without recursion, since depth is the file's choice."""
    seen = {_address(top): "/"}
    yield {"path": "/", "kind": "group", "attributes": _attributes(top)}
    open_groups = [(top, "", iter(hdf5.names(top)))]
    while open_groups:
        group, above, names = open_groups[-1]
        name = next(names, None)
        if name is None:
            open_groups.pop()
            continue
        path = f"{above}/{name}"
        try:
            row, found = _child(group, name, path, seen)
            inner = [] if found is None else hdf5.names(found)
        except _FAULTS as failure:
            row, found, inner = {"path": path, "kind": "unreadable", "target": f"{failure!s:.300}"}, None, []
        yield row
        if found is not None and len(open_groups) >= _MOST_DEPTH:
            if inner:
                yield {"path": f"{path}/...", "kind": "not shown", "target": f"more than {_MOST_DEPTH} groups deep"}
        elif found is not None:
            open_groups.append((found, path, iter(inner)))


def _child(group: h5g.GroupID, name: str, path: str, seen: dict[Any, str]) -> tuple[dict[str, Any], h5g.GroupID | None]:
    """The row of what a link of a group leads to, and the group that is to be entered, if it is one."""
    raw = name.encode(errors="surrogateescape")
    kind = group.links.get_info(raw).type
    if kind == h5l.TYPE_EXTERNAL:
        file, inner = (part.decode(errors="replace") for part in group.links.get_val(raw))
        return {"path": path, "kind": "external link", "target": f"{file}:{inner}"}, None
    if kind == h5l.TYPE_SOFT:
        target = group.links.get_val(raw).decode(errors="replace")
        return {"path": path, "kind": "soft link", "target": target}, None
    if kind != h5l.TYPE_HARD:
        return {"path": path, "kind": "unknown link"}, None
    found = h5o.open(group, raw)
    address = _address(found)
    if address in seen:
        return {"path": path, "kind": "same as", "target": seen[address]}, None
    seen[address] = path
    if isinstance(found, h5g.GroupID):
        return {"path": path, "kind": "group", "attributes": _attributes(found)}, found
    if isinstance(found, h5d.DatasetID):
        return {"path": path, "kind": "dataset", **_dataset(found), "attributes": _attributes(found)}, None
    return {"path": path, "kind": "type", "type": _type(found) if isinstance(found, h5t.TypeID) else None}, None


def _dataset(found: h5d.DatasetID) -> dict[str, Any]:
    kind, shape = found.get_type(), found.shape
    told = {"shape": None if shape is None else list(shape), "type": _type(kind), "offset": found.get_offset()}
    if not _is_in_place(kind):
        # HDF5 would read the fill value from the heap to tell the properties; only contiguous elements have an offset
        layout = None if told["offset"] is None else "contiguous"
        return {**told, "layout": layout, "bytes": None if layout is None else found.get_storage_size()}
    plan: h5p.PropDCID = found.get_create_plist()
    layout, sources = _LAYOUTS.get(plan.get_layout()), []
    if plan.get_external_count():
        layout = "external"
        sources = [plan.get_external(number)[0] for number in range(min(plan.get_external_count(), _MOST_SOURCES))]
    elif layout == "virtual":
        sources = [plan.get_virtual_filename(n) for n in range(min(plan.get_virtual_count(), _MOST_SOURCES))]
    filters = [plan.get_filter(number) for number in range(plan.get_nfilters())]
    return {
        **told,
        "layout": layout,
        "sources": sorted({_decoded(source) for source in sources}),
        "filters": [_decoded(name) or f"number {code}" for code, _, _, name in filters],
        # of elements in other files HDF5 would have to look there
        "bytes": None if sources else found.get_storage_size(),
    }


def _decoded(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _address(found: h5i.ObjectID) -> tuple[int, int]:
    info = h5o.get_info(found)
    return info.fileno, info.addr


def _type(kind: h5t.TypeID) -> str:
    if isinstance(kind, h5t.TypeStringID):
        return "text" if kind.is_variable_str() else f"text[{kind.get_size()}]"
    try:
        return str(kind.dtype)
    except (TypeError, ValueError):
        return f"{kind.get_size()} bytes"


def _attributes(owner: h5i.ObjectID) -> dict[str, Any]:
    """Values of attributes as JSON values; what is long, of no plain type or not readable is described."""
    found: dict[str, Any] = {}
    try:
        count = h5a.get_num_attrs(owner)
        if count > _MOST_ATTRIBUTES:
            return {"": f"{count} attributes"}
        for raw in hdf5.attribute_names(owner, count):
            found[raw.decode(errors="replace")] = _value(owner, raw)
    except _FAULTS as failure:
        found[""] = f"unreadable: {failure!s:.300}"
    return found


def _value(owner: h5i.ObjectID, name: bytes) -> Any:
    own = h5a.open(owner, name)
    kind = own.get_type()
    if own.get_space().get_simple_extent_type() == h5s.NULL:
        return None
    if not _is_plain(kind) or math.prod(own.shape) * kind.get_size() > _LONGEST_BYTES:
        return f"{_type(kind)} {list(own.shape)}"
    value = np.empty(own.shape, kind.dtype)
    own.read(value, mtype=kind)
    return _plain(value[()])


def _is_in_place(kind: h5t.TypeID) -> bool:
    """True if no part of a value of the type is in a heap."""
    if isinstance(kind, h5t.TypeCompoundID):
        return all(_is_in_place(kind.get_member_type(number)) for number in range(kind.get_nmembers()))
    if isinstance(kind, h5t.TypeArrayID):
        return _is_in_place(kind.get_super())
    return _is_plain(kind) or isinstance(kind, h5t.TypeOpaqueID)


def _is_plain(kind: h5t.TypeID) -> bool:
    """True if values of the type are not in a heap, where damage can make HDF5 loop for ever."""
    if isinstance(kind, h5t.TypeStringID):
        return not kind.is_variable_str()
    return isinstance(kind, (h5t.TypeIntegerID, h5t.TypeFloatID, h5t.TypeEnumID, h5t.TypeBitfieldID))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, int, str)) or (isinstance(value, float) and np.isfinite(value)):
        return value
    return str(value)
