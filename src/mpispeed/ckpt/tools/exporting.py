"""`ckpt export`: the weights of a checkpoint as files that other programs read, a part at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid as uuids
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.base.files import sync_folder
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import numbers, schema
from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.ckpt.read.reader import Reader
from mpispeed.ckpt.tools import casting, packed_weights, weight_files
from mpispeed.ckpt.tools.weight_files import Weight, Writer

if TYPE_CHECKING:
    from mpispeed.native.packed_codes import PackedCodes

#: the slot of a parameter that has its weight in 16 bits
_WEIGHT16 = "weight16"


@dataclass(frozen=True, slots=True)
class _Format:
    """A file format for weights.

    Attributes:
        write: makes one file.
        suffixes: of paths that are one file of this format.
        stem: names the files in a folder, with `extension`.
        has_shards: a folder may have several files and an index.
    """

    write: Writer
    suffixes: tuple[str, ...]
    stem: str
    extension: str
    has_shards: bool

    def single(self) -> str:
        """Name of the only file in a folder."""
        return f"{self.stem}{self.extension}"

    def index(self) -> str:
        """Name of the index of shards."""
        return f"{self.single()}.index.json"

    def names(self, count: int) -> list[str]:
        """Names of `count` files in a folder."""
        if count == 1:
            return [self.single()]
        return [f"{self.stem}-{number + 1:05d}-of-{count:05d}{self.extension}" for number in range(count)]

    def is_own(self, name: str) -> bool:
        """True if an export into a folder gives some file this name."""
        pattern = rf"{re.escape(self.stem)}(-\d{{5,}}-of-\d{{5,}})?{re.escape(self.extension)}"
        return name == self.index() or re.fullmatch(pattern, name) is not None


FORMATS = {
    "safetensors": _Format(weight_files.write_safetensors, (".safetensors",), "model", ".safetensors", True),
    "torch": _Format(weight_files.write_torch, (".bin", ".pt", ".pth"), "pytorch_model", ".bin", True),
    "npz": _Format(weight_files.write_npz, (".npz",), "model", ".npz", False),
    "hdf5": _Format(weight_files.write_hdf5, (".h5", ".hdf5"), "model", ".h5", False),
}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "keep": ""}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export.

    Attributes:
        files: the files with weights, then the index if there is one.
        tensors: number of tensors written, without aliases.
        overflows: name -> number of its finite elements that are too large for the written dtype.

    Units:
        size_bytes: bytes of all files.
    """

    files: list[Path]
    size_bytes: int
    tensors: int
    overflows: dict[str, int]


class Packer(Protocol):
    """Interface of what turns weights of a checkpoint into packed codes."""

    def leaves_out(self, name: str) -> bool:
        """True if the parameter or buffer is not exported: it is in the codes of others already."""

    def pack(self, name: str) -> PackedCodes | np.ndarray | None:
        """The codes of a parameter, or other values in fp32; None if it is exported as it is. The same at each call."""


def format_of(path: Path) -> str:
    """The format whose suffix `path` has, or "" ."""
    return next((name for name, form in FORMATS.items() if path.suffix.lower() in form.suffixes), "")


def is_one_file(output: Path) -> bool:
    """True if weights exported to `output` make one file, False if they make a folder."""
    return bool(format_of(output)) and not output.is_dir()


def export(
    reader: Reader,
    output: Path,
    *,
    to: str,
    dtype: str = "fp32",
    shard_bytes: int | None = None,
    exclude_frozen: bool = False,
    prefix_map: Sequence[tuple[str, str]] = (),
    overwrite: bool = False,
    packer: Packer | None = None,
) -> ExportReport:
    """Write the weights (masters, or 16-bit weights where there is no master) and the buffers of a checkpoint.

    Files appear complete or not at all. Elements are compared with their checksums as they are read. One part of a
    tensor is in memory at a time; with "torch" one shard.

    Args:
        reader: the checkpoint.
        output: with a suffix of the format one file, else a folder, which is made if missing.
        to: "safetensors", "torch", "npz" or "hdf5".
        dtype: "fp32", "fp16" or "bf16" for all floating tensors, or "keep": parameters in the dtype they are
            trained in, buffers as they are.
        shard_bytes: files in a folder have at most so many bytes of elements, unless one tensor has more; None for
            one file. Formats without shards, and an `output` that is one file, take no notice.
        exclude_frozen: leave parameters out that are not trained.
        prefix_map: (regular expression, replacement), applied to all names in order.
        overwrite: replace files that exist.
        packer: makes codes of some weights; for "hdf5" only. It is asked twice for each, and each is whole in memory
            meanwhile.

    Raises:
        CheckpointError: a word is unknown, names collide, a file exists, or the format has no place for a dtype or
            for codes.
        CorruptCheckpoint: elements are not those that were saved.
        OSError: the file system refuses.
    """
    _chosen(output, to, dtype)
    if packer is not None and to != "hdf5":
        msg = f"{to} has no place for packed codes; export quantized weights as hdf5"
        raise CheckpointError(msg)
    weights = _weights(reader, dtype, exclude_frozen, _Renamer(prefix_map), packer)
    overflows: dict[str, int] = {}
    elements = _Elements(reader, overflows, packer)
    files = write_files(output, weights, elements, to=to, shard_bytes=shard_bytes, overwrite=overwrite)
    return ExportReport(files, sum(path.stat().st_size for path in files), len(weights), overflows)


def write_files(
    output: Path,
    weights: Sequence[Weight],
    elements: weight_files.Elements,
    *,
    to: str,
    shard_bytes: int | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write weights given by an iterator of elements; other arguments and errors as `export`.

    Returns:
        The files with weights, then the index if there is one.
    """
    form = _chosen(output, to, "keep")
    if is_one_file(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        target = _Target(output.parent, {output.name}, overwrite)
        shards = {output.name: list(weights)}
    else:
        cut = _cut(weights, shard_bytes if form.has_shards else None)
        shards = dict(zip(form.names(len(cut)), cut, strict=True))
        output.mkdir(parents=True, exist_ok=True)
        taken = {path.name for path in output.iterdir() if form.is_own(path.name)}
        target = _Target(output, taken, overwrite)
    with target:
        for name, own in shards.items():
            form.write(target.temporary(name), own, elements)
        if len(shards) > 1:
            manifests.write_durably(target.temporary(form.index()), _index_text(shards))
        return target.publish()


def _chosen(output: Path, to: str, dtype: str) -> _Format:
    for word, known in ((to, FORMATS), (dtype, DTYPES)):
        if word not in known:
            msg = f"cannot export to {word!r}; it may be {', '.join(known)}"
            raise CheckpointError(msg)
    found = format_of(output)
    if is_one_file(output) and found != to:
        msg = f"{output} has the suffix of {found}, the format asked for is {to}; choose one"
        raise CheckpointError(msg)
    return FORMATS[to]


class _Renamer:
    """Applies the expressions of a prefix map; each has to change some name."""

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        self._rows: list[tuple[re.Pattern[str], str]] = []
        self._unused = {old for old, _ in rows}
        for old, new in rows:
            try:
                self._rows.append((re.compile(old), new))
                re.compile(old).sub(new, "")
            except (re.error, IndexError) as failure:
                msg = f"{old!r} -> {new!r} is no valid replacement of names: {failure}"
                raise CheckpointError(msg) from failure

    def __call__(self, name: str) -> str:
        for pattern, new in self._rows:
            name, count = pattern.subn(new, name)
            if count:
                self._unused.discard(pattern.pattern)
        return name

    def check(self) -> None:
        """Refuse expressions that match no name.

        Raises:
            CheckpointError: names them.
        """
        if self._unused:
            msg = f"no name fits {', '.join(map(repr, sorted(self._unused)))}; names are as `ckpt show` lists them"
            raise CheckpointError(msg)


def _weights(reader: Reader, dtype: str, exclude_frozen: bool, rename: _Renamer, packer: Packer | None) -> list[Weight]:
    aliases: dict[str, list[str]] = {}
    for alias, canonical in sorted(reader.aliases().items()):
        aliases.setdefault(canonical, []).append(rename(alias))
    made: list[Weight] = []
    for name in reader.names():
        info = reader.info(name)
        new = rename(name)
        if (exclude_frozen and info.kind == "frozen") or (packer and packer.leaves_out(name)):
            continue
        source, target = _source(reader, info, dtype)
        changed, others = packer.pack(name) if packer else None, tuple(aliases.get(name, ()))
        if changed is not None:
            made += packed_weights.parts(new, others, name, changed, target)
        else:
            made.append(Weight(new, others, reader.stored(name, source), target))
    for name in reader.buffers():
        if packer and packer.leaves_out(name):
            continue
        stored = reader.stored(name, schema.BUFFER_SLOT)
        target = DTYPES[dtype] if numbers.is_float(stored.dtype) else ""
        made.append(Weight(rename(name), (), stored, target or stored.dtype))
    rename.check()
    seen: set[str] = set()
    for name in (name for weight in made for name in (weight.name, *weight.aliases)):
        if name in seen:
            msg = f"two tensors would have the name {name!r}; change the prefix map"
            raise CheckpointError(msg)
        seen.add(name)
    return made


def _source(reader: Reader, info: ParamInfo, dtype: str) -> tuple[str, str]:
    """The slot to read the weight from, and the dtype to write."""
    have = [slot for slot in (schema.MASTER_SLOT, _WEIGHT16) if slot in reader.slots(info.name)]
    if not have:
        msg = f"{reader.path} has neither {schema.MASTER_SLOT} nor {_WEIGHT16} of {info.name!r}: nothing to export"
        raise CheckpointError(msg)
    stored = reader.stored(info.name, have[0]).dtype
    target = DTYPES[dtype] or str(info.train_dtype)
    if not (numbers.is_float(stored) and numbers.is_float(target)):
        return have[0], stored
    # what the model computed with, bit for bit, where it is stored
    exact = [slot for slot in have if reader.stored(info.name, slot).dtype == target]
    return (exact or have)[0], target


def _cut(weights: Sequence[Weight], limit: int | None) -> list[list[Weight]]:
    """Runs of weights of at most `limit` bytes; a larger weight is a run of its own."""
    if limit is not None and limit < 1:
        msg = f"a shard of {limit} bytes can hold nothing; give at least 1"
        raise CheckpointError(msg)
    shards: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if limit is not None and shards[-1] and filled + weight.size_bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.size_bytes
    return shards


def _index_text(shards: dict[str, list[Weight]]) -> str:
    total = sum(weight.size_bytes for own in shards.values() for weight in own)
    is_torch = any(name.startswith(FORMATS["torch"].stem) for name in shards)
    places = {
        name: file
        for file, own in shards.items()
        for weight in own
        for name in (weight.name, *(weight.aliases if is_torch else ()))
    }
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


class _Elements:
    """Converts elements of weights to bytes of the dtype to write, and counts overflows."""

    def __init__(self, reader: Reader, overflows: dict[str, int], packer: Packer | None = None) -> None:
        self._reader, self._overflows, self._packer = reader, overflows, packer
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})

    def __call__(self, weight: Weight) -> Iterator[memoryview]:
        total = 0
        is_made = weight.source.slot.startswith(packed_weights.SLOT)
        for stored in self._made(weight) if is_made else self._reader.chunks(weight.source):
            made = casting.cast(stored, weight.source.dtype, weight.dtype)
            total += casting.count_overflows(stored, weight.source.dtype, made, weight.dtype)
            yield made.data.cast("B") if made.size else memoryview(b"")
        if total:
            self._overflows[weight.name] = total

    def _made(self, weight: Weight) -> Iterator[np.ndarray]:
        """What the packer made; parts of one weight are asked for one after the other."""
        name, end = weight.source.name, weight.source.slot.removeprefix(packed_weights.SLOT)
        if self._last[0] != name:
            made = self._packer.pack(name) if self._packer else None
            self._last = (name, {} if made is None else packed_weights.contents(made))
        yield np.ascontiguousarray(self._last[1][end]).reshape(-1)


class _Target:
    """Files that are published in a folder together, or not at all. A context manager."""

    def __init__(self, folder: Path, taken: set[str], overwrite: bool) -> None:
        """Args: `taken`: names that belong to earlier exports and go when the new files come."""
        present = sorted(name for name in taken if os.path.lexists(folder / name))
        if present and not overwrite:
            msg = f"{folder / present[0]} exists; choose another place or overwrite it (--force)"
            raise CheckpointError(msg)
        for name in present:
            if (folder / name).is_dir():
                msg = f"{folder / name} is a folder and is not overwritten"
                raise CheckpointError(msg)
        self._folder, self._stale, self._id = folder, set(present), uuids.uuid4().hex
        self._made: dict[str, Path] = {}

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._made.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def temporary(self, name: str) -> Path:
        """Temporary path of the file that will be called `name`."""
        self._made[name] = self._folder / f".{name}.tmp-{self._id}"
        return self._made[name]

    def publish(self) -> list[Path]:
        """Move the files to their names and remove stale ones; return them in the order of their creation."""
        # an index of earlier shards must not be found beside new ones
        for name in self._stale:
            if name.endswith(".json") or name not in self._made:
                (self._folder / name).unlink(missing_ok=True)
        files = []
        for name, path in self._made.items():
            path.rename(self._folder / name)
            files.append(self._folder / name)
        sync_folder(self._folder)
        return files
