"""`ckpt tree`: the HDF5 objects of a checkpoint, as `h5ls -r` would list them; follows no link. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5a, h5d, h5g, h5i, h5l, h5o, h5s, h5t

from mpispeed.ckpt.format import hdf5, schema, tags
from mpispeed.ckpt.format.index import translated
from mpispeed.ckpt.tools.show import split_location

#: attributes that are longer are not read
_LONGEST_BYTES = 64 << 10
#: of an object with more only the number is told
_MOST_ATTRIBUTES = 10_000


def rows(location: str) -> list[dict[str, Any]]:
    """One row per object of model.h5, the data files and state.h5, as far as they are there.

    Nothing is checked: this also shows what a damaged or unfinished checkpoint has.

    Args:
        location: "DIR" (its latest), "DIR:tag", a tag's own folder, or one HDF5 file.

    Returns:
        Rows with the keys file, path, kind ("group", "dataset", "type", "soft link", "external link", or "same as"
        an object that was listed), target (of links), shape, type, offset, bytes (of datasets) and attributes.

    Raises:
        NoCheckpoint: no tag was given and there is no `latest`.
        TagNotFound: there is no such tag.
        CorruptCheckpoint: HDF5 cannot make sense of a file.
    """
    if Path(location).is_file():
        return list(_rows(Path(location), Path(location).name))
    path, _ = tags.resolve(*split_location(location))
    data = sorted((path / schema.DATA_FOLDER).glob("*.h5"))
    files = [path / schema.MODEL_FILE, *data, path / schema.STATE_FILE]
    return [row for file in files if file.exists() for row in _rows(file, file.relative_to(path).as_posix())]


def _rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    with translated(path), hdf5.open_reading(path) as file:
        top = h5g.open(file.id, b"/")
        yield _row(name, "/", "group", attributes=_attributes(top))
        for row in _children(top, "", {_address(top): "/"}):
            yield _row(name, **row)


def _row(file: str, path: str, kind: str, **more: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "target": None,
        "shape": None,
        "type": None,
        "offset": None,
        "bytes": None,
        "attributes": {},
    }
    return {"file": file, "path": path, "kind": kind, **empty, **more}


def _children(group: h5g.GroupID, above: str, seen: dict[Any, str]) -> Iterator[dict[str, Any]]:
    for name in hdf5.names(group):
        path, raw = f"{above}/{name}", name.encode(errors="surrogateescape")
        kind = group.links.get_info(raw).type
        if kind == h5l.TYPE_EXTERNAL:
            file, inner = (part.decode(errors="replace") for part in group.links.get_val(raw))
            yield {"path": path, "kind": "external link", "target": f"{file}:{inner}"}
        elif kind == h5l.TYPE_SOFT:
            target = group.links.get_val(raw).decode(errors="replace")
            yield {"path": path, "kind": "soft link", "target": target}
        elif kind == h5l.TYPE_HARD:
            yield from _object(h5o.open(group, raw), path, seen)
        else:
            yield {"path": path, "kind": "unknown link"}


def _object(found: h5i.ObjectID, path: str, seen: dict[Any, str]) -> Iterator[dict[str, Any]]:
    address = _address(found)
    if address in seen:
        yield {"path": path, "kind": "same as", "target": seen[address]}
        return
    seen[address] = path
    if isinstance(found, h5g.GroupID):
        yield {"path": path, "kind": "group", "attributes": _attributes(found)}
        yield from _children(found, path, seen)
    elif isinstance(found, h5d.DatasetID):
        yield {
            "path": path,
            "kind": "dataset",
            "shape": list(found.shape),
            "type": _type(found.get_type()),
            "offset": found.get_offset(),
            "bytes": found.get_storage_size(),
            "attributes": _attributes(found),
        }
    else:
        yield {"path": path, "kind": "type", "type": _type(found) if isinstance(found, h5t.TypeID) else None}


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
    """Values of attributes as JSON values; what is long or of no plain type is described."""
    count = h5a.get_num_attrs(owner)
    if count > _MOST_ATTRIBUTES:
        return {"": f"{count} attributes"}
    found: dict[str, Any] = {}
    for raw in hdf5.attribute_names(owner, count):
        own = h5a.open(owner, raw)
        name, kind = raw.decode(errors="replace"), own.get_type()
        if own.get_space().get_simple_extent_type() == h5s.NULL:
            found[name] = None
        elif not _is_plain(kind) or math.prod(own.shape) * kind.get_size() > _LONGEST_BYTES:
            found[name] = f"{_type(kind)} {list(own.shape)}"
        else:
            value = np.empty(own.shape, kind.dtype)
            own.read(value, mtype=kind)
            found[name] = _plain(value[()])
    return found


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
