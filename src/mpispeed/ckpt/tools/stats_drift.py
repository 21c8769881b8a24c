"""Distances between the weights of several checkpoints, by parameter and by layer, a few MiB at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import tags
from mpispeed.ckpt.format.errors import TagNotFound
from mpispeed.ckpt.format.index import TensorEntry
from mpispeed.ckpt.read.reader import Reader, open_reader
from mpispeed.ckpt.tools import stats
from mpispeed.ckpt.tools.tally import finite_of

#: what a checkpoint is compared with
ROLES = ("previous", "first")


@dataclass(slots=True)
class _Sums:
    """Sums over the elements that are finite in both of two tensors, or of the tensors of a layer."""

    change: float = 0.0
    old: float = 0.0
    new: float = 0.0
    product: float = 0.0
    compared: int = 0

    def add(self, new: np.ndarray, old: np.ndarray) -> None:
        is_used = np.isfinite(new) & np.isfinite(old)
        if not is_used.all():
            new, old = new[is_used], old[is_used]
        self.compared += len(new)
        with np.errstate(over="ignore", invalid="ignore"):
            self.new += float(np.dot(new, new))
            self.old += float(np.dot(old, old))
            self.product += float(np.dot(new, old))
            step = new - old
            self.change += float(np.dot(step, step))

    def merge(self, other: _Sums) -> None:
        self.change += other.change
        self.old += other.old
        self.new += other.new
        self.product += other.product
        self.compared += other.compared

    def columns(self, role: str) -> dict[str, float | None]:
        """Relative change and cosine; None where a norm they divide by is zero."""
        change = math.sqrt(self.change / self.old) if self.old else None
        norms = math.sqrt(self.new) * math.sqrt(self.old)
        cosine = _finite(self.product / norms) if norms else None
        if cosine is not None:
            cosine = max(-1.0, min(1.0, cosine))  # rounding
        if self.compared and not self.old and not self.new:
            change = 0.0  # zero before and zero now
        return {f"{role}_change": _finite(change), f"{role}_cosine": cosine}


@dataclass(slots=True)
class _Found:
    """One parameter in one tag: its size, and sums against earlier tags."""

    squares: float = 0.0
    finite: int = 0
    sums: dict[str, _Sums] = field(default_factory=dict)
    note: str = ""

    @property
    def rms(self) -> float | None:
        """Root of the mean square of the finite elements."""
        return _finite(math.sqrt(self.squares / self.finite)) if self.finite else None


def complete_tags(folder: Path) -> tuple[list[str], list[str]]:
    """The tags of a folder that can be read, by step, and a line about each of the others.

    Raises:
        TagNotFound: there is no such folder, or no complete checkpoint in it.
    """
    entries = tags.list_tags(folder) if folder.is_dir() else []
    whole = [entry.tag for entry in entries if entry.status == "ok"]
    if not whole:
        what = "holds no complete checkpoint" if folder.is_dir() else "is no folder"
        msg = f"{folder} {what}; give the folder that holds the folders of the tags"
        raise TagNotFound(msg)
    return whole, [f"{entry.tag} is {entry.status}: {entry.problem}" for entry in entries if entry.status != "ok"]


def drift(folder: Path, wanted: Sequence[str], pattern: str = "") -> dict[str, list[dict[str, Any]]]:
    """Compare the weights of tags with those of the tag before and of the first.

    With w_t the elements now and w_s those of the other tag, change is ||w_t - w_s|| / ||w_s|| and cosine is
    w_t.w_s / (||w_t|| ||w_s||), over the elements that are finite in both; those of a layer are over all elements of
    the parameters that can be compared. Sums are double precision; squares above 1e308 give None, those below 1e-308
    count as zero. Three tags are open
    at once, however many there are.

    Args:
        folder: the folder of the tags.
        wanted: tags in the order in which they are compared.
        pattern: selects parameters, as for `show.rows`.

    Returns:
        "tags": rows with tag and step. "params": for every tag a row per parameter with the keys tag, step, name,
        layer, rms, previous_change, previous_cosine, first_change, first_cosine and note, which tells of parameters
        that are missing, new or of another shape. "layers": for every tag a row per layer with the same keys but name
        and note, and the numbers of parameters that were found (parameters) and that carry a note (noted).

    Raises:
        CheckpointError: no parameter of any of the tags fits, or a tag is named twice.
        TagNotFound: one of the tags does not exist.
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    twice = sorted({tag for tag in wanted if wanted.count(tag) > 1})
    if twice:
        msg = f"{', '.join(twice)} named twice; name every tag once, in the order to compare"
        raise CheckpointError(msg)
    result: dict[str, list[dict[str, Any]]] = {"tags": [], "params": [], "layers": []}
    held: list[Reader] = []  # the first, the one before and the one in turn
    try:
        for tag in wanted:
            current = open_reader(folder, tag)
            others = {"previous": held[-1], "first": held[0]} if held else {}
            held.append(current)
            found = _compare_all(current, others, pattern)
            label = {"tag": current.tag, "step": current.global_step}
            result["tags"].append(label)
            result["params"] += [label | _param_row(name, found[name]) for name in found]
            result["layers"] += [label | row for row in _layer_rows(found)]
            for reader in held[1:-1]:
                reader.close()
            del held[1:-1]
    finally:
        for reader in held:
            reader.close()
    if not result["params"]:
        msg = f"no parameter of the tags {', '.join(wanted)} in {folder} fits {pattern!r}"
        raise CheckpointError(msg)
    return result


def _compare_all(current: Reader, others: dict[str, Reader], pattern: str) -> dict[str, _Found]:
    names: set[str] = set()
    for reader in (current, *others.values()):
        names |= {name for name in stats.fitting(reader.index, pattern) if stats.weight_of(reader, name)}
    return {name: _compare(current, others, name) for name in sorted(names, key=stats.natural)}


def _compare(current: Reader, others: dict[str, Reader], name: str) -> _Found:
    now = stats.weight_of(current, name)
    found, notes = _Found(), []
    streams, sums = [], {}  # with one tag before, it is both roles and read once
    for role, reader in others.items():
        before = stats.weight_of(reader, name)
        problem = _problem(now, before, reader.tag)
        if problem:
            notes.append(problem)
        elif before is not None:
            if reader.tag not in sums:
                sums[reader.tag] = _Sums()
                streams.append(stats.pieces(reader, before, verify=False))  # verified when its own turn was
            found.sums[role] = sums[reader.tag]
    if now is None:
        found.note = "missing"
        return found
    found.note = "; ".join(dict.fromkeys(notes))
    for new, *olds in zip(stats.pieces(current, now), *streams, strict=True):
        wide = new.astype(np.float64)
        finite = finite_of(wide)
        found.finite += len(finite)
        with np.errstate(over="ignore"):
            found.squares += float(np.dot(finite, finite))
        for one, old in zip(sums.values(), olds, strict=True):
            one.add(wide, old.astype(np.float64))
    return found


def _problem(now: TensorEntry | None, before: TensorEntry | None, tag: str) -> str:
    """The reason why two tensors cannot be compared, or ""."""
    if now is None or before is None:
        return f"not in {tag}"
    if now.shape != before.shape:
        return f"reshaped: {list(before.shape)} in {tag}, here {list(now.shape)}"
    if "complex" in now.dtype + before.dtype:
        return f"{before.dtype} of {tag} and {now.dtype} are not compared"
    return ""


def _param_row(name: str, found: _Found) -> dict[str, Any]:
    row = {"name": name, "layer": stats.layer_of(name), "rms": found.rms}
    return row | _changes(found.sums) | {"note": found.note}


def _changes(sums: dict[str, _Sums]) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for role in ROLES:
        columns |= sums[role].columns(role) if role in sums else {f"{role}_change": None, f"{role}_cosine": None}
    return columns


def _layer_rows(found: dict[str, _Found]) -> list[dict[str, Any]]:
    by_layer: dict[str, list[_Found]] = {}
    for name, one in found.items():
        by_layer.setdefault(stats.layer_of(name), []).append(one)
    return [_layer_row(layer, by_layer[layer]) for layer in sorted(by_layer, key=stats.natural)]


def _layer_row(layer: str, members: Sequence[_Found]) -> dict[str, Any]:
    whole = _Found()
    for member in members:
        whole.squares += member.squares
        whole.finite += member.finite
        for role, sums in member.sums.items():
            whole.sums.setdefault(role, _Sums()).merge(sums)
    noted = sum(bool(member.note) for member in members)
    row = {"layer": layer, "rms": whole.rms} | _changes(whole.sums)
    return row | {"parameters": len(members) - sum(m.note == "missing" for m in members), "noted": noted}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def heat_map(drifted: Mapping[str, Any], column: str) -> tuple[list[str], list[str], list[list[float | None]]]:
    """One number of every layer and tag after the first: texts of the tags, names of the layers, rows of numbers.

    Args:
        drifted: from `drift`.
        column: "previous_change", "first_change" or another number of the rows.

    Shapes:
        numbers: [layers, tags - 1]; None where a layer has nothing to compare
    """
    names = [row["tag"] for row in drifted["tags"]]
    by_layer: dict[str, dict[str, float | None]] = {}
    for row in drifted["layers"]:
        by_layer.setdefault(row["layer"], {})[row["tag"]] = row[column]
    layers = sorted(by_layer, key=stats.natural)
    labels = [f"{row['tag']} ({row['step']})" for row in drifted["tags"][1:]]
    return labels, layers, [[by_layer[layer].get(tag) for tag in names[1:]] for layer in layers]
