"""`ckpt show`: names, attributes and state of one checkpoint, read without parameter elements."""

from __future__ import annotations

import fnmatch
import math
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.ckpt.format import experts, objects, schema
from mpispeed.ckpt.format.index import Index
from mpispeed.ckpt.read.reader import Reader, open_reader


def split_location(location: str) -> tuple[Path, str | None]:
    """Folder and tag from "DIR" or "DIR:tag"; a path that exists as written is a folder."""
    whole = Path(location)
    folder, colon, tag = location.rpartition(":")
    if whole.exists() or not colon or not folder or not tag:
        return whole, None
    return Path(folder), tag


def open_location(location: str) -> Reader:
    """Open the checkpoint at "DIR" (its latest), "DIR:tag", or a tag's own folder.

    Raises:
        NoCheckpoint: no tag was given and there is no `latest`.
        TagNotFound: there is no such tag.
        IncompleteCheckpoint: it was never committed.
        CorruptCheckpoint: a file is missing, of another size, or not readable.
    """
    return open_reader(*split_location(location))


def rows(index: Index, pattern: str = "") -> list[dict[str, Any]]:
    """One row per parameter, buffer and alias whose name fits.

    Args:
        index: of a checkpoint.
        pattern: shell-style (`layers.*.weight`); without wildcards, a part of the name; empty for all.

    Returns:
        Rows with the keys name, shape, dtype, kind, tp_kind, group, step, slots (name -> dtype), bytes and expert
        ([number, experts of the layer], or None; the number is -1 for a tensor of all).
    """
    slots: dict[str, dict[str, str]] = {}
    sizes: dict[str, int] = {}
    for (name, slot), tensor in index.tensors.items():
        if slot != schema.BUFFER_SLOT:
            slots.setdefault(name, {})[slot] = tensor.dtype
            sizes[name] = sizes.get(name, 0) + tensor.size_bytes
    found = [
        _row(name, info.shape, str(info.train_dtype), info.kind, slots.get(name, {}), sizes.get(name, 0))
        | {"tp_kind": info.tp_kind, "group": info.param_group, "step": info.step}
        | {"expert": None if info.expert is None else list(info.expert)}
        for name, info in index.params.items()
    ]
    found += [
        _row(name, tensor.shape, tensor.dtype, "buffer", {}, tensor.size_bytes)
        for (name, slot), tensor in index.tensors.items()
        if slot == schema.BUFFER_SLOT
    ]
    for alias, canonical in index.aliases.items():
        info = index.params[canonical]
        found.append(_row(alias, info.shape, str(info.train_dtype), f"alias of {canonical}", {}, 0))
    return [row for row in found if fits(row["name"], pattern)]


def expert_rows(index: Index, pattern: str = "") -> list[dict[str, Any]]:
    """One row per layer of experts of which a parameter fits.

    Returns:
        Rows with the keys layer, experts (their number), params and bytes (of all slots).
    """
    sizes: dict[str, int] = {}
    for (name, slot), tensor in index.tensors.items():
        if slot != schema.BUFFER_SLOT:
            sizes[name] = sizes.get(name, 0) + tensor.size_bytes
    made = []
    for layer in experts.layers(info for name, info in index.params.items() if fits(name, pattern)).values():
        names = [info.name for info in layer.params]
        size = sum(sizes.get(name, 0) for name in names)
        made.append({"layer": layer.name, "experts": layer.total, "params": len(names), "bytes": size})
    return made


def _row(name: str, shape: tuple[int, ...], dtype: str, kind: str, slots: dict[str, str], size: int) -> dict[str, Any]:
    shared = {"name": name, "shape": list(shape), "dtype": dtype, "kind": kind, "tp_kind": None, "group": None}
    return shared | {"step": None, "slots": slots, "bytes": size, "expert": None}


def fits(name: str, pattern: str) -> bool:
    """True if a name fits a pattern of `rows`."""
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def state(reader: Reader) -> dict[str, Any]:
    """The state tree and the generators as JSON values; arrays and tensors are described, not listed.

    Raises:
        CorruptCheckpoint: state.h5 cannot be read.
    """
    plain: dict[str, Any] = _plain(reader.state(_describe_tensor))
    plain[schema.RNG] = {
        kind: f"{len(rows)} ranks, {max(map(len, rows), default=0)} bytes each"
        for kind in reader.rng_kinds()
        for rows in [reader.rng(kind)]
    }
    return plain


def _describe_tensor(array: np.ndarray, dtype: str) -> str:
    return f"tensor {dtype} {list(array.shape)}"


def _plain(value: Any) -> Any:
    value = objects.opened(value)
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return objects.text(value) if objects.kind_of(value) in objects.TEXTS else value
