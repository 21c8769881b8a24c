"""Tensors of weight files by name, as plain data: shape, dtype, and where their elements are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.found import MASTER, WEIGHT16, Found, ReadOptions
from mpispeed.ckpt.foreign.in_file import Blocks, InFile, State, located, states_of
from mpispeed.ckpt.foreign.mapping import Extent, Notes, noted
from mpispeed.ckpt.foreign.opening import open_foreign
from mpispeed.ckpt.foreign.values import Chain, Values
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.index import TensorEntry
from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.ckpt.read.reader import Reader, open_reader

SHARD_SLOT, SLICES = "tensor{rank:03d}", "slices"
"""Slot of the slice of one rank in a sharded copy, and the entry of its state that tells which slice it is."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of a part of a tensor.

    Attributes:
        values: in row-major order of the part.
        ranges: [start, stop) along the dim of the source that it has, one behind the other; further ones are padding.
        length: of the part along that dim, with padding.
    """

    values: Values
    ranges: Ranges
    length: int


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that files have, whole or in parts.

    Attributes:
        name: in the files.
        shape: of the whole.
        dtype: of the elements.
        shards: the parts.
        dim: along which they are parts; 0 for one that is whole.
        where: file or folder, for messages.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    dim: int
    where: str

    @property
    def whole(self) -> Values:
        """All elements.

        Raises:
            CheckpointError: it is in parts along another dim than the first, or in several ranges.
        """
        if len(self.shards) == 1:
            return self.shards[0].values
        at, links, inner = 0, list[tuple[Values, int, int]](), math.prod(self.shape[1:])
        for shard in self.shards:
            if self.dim or len(shard.ranges) != 1 or shard.ranges[0][0] != at:
                msg = f"{self.name!r} of {self.where} is in parts along dim {self.dim}, which cannot be joined here"
                raise CheckpointError(msg)
            at = shard.ranges[0][1]
            links.append((shard.values, 0, (at - shard.ranges[0][0]) * inner))
        return Chain(links, self.dtype)


@dataclass(frozen=True, slots=True)
class Sliced:
    """A tensor of which files of several ranks have slices; how they fit together is told by the model.

    Attributes:
        name: in the files.
        slices: shape and elements of each, in the order of ranks.
        dtype: of the elements.
        where: file, for messages.
        version: of Megatron's checkpoints.
    """

    name: str
    slices: tuple[tuple[tuple[int, ...], Values], ...]
    dtype: torch.dtype
    where: str
    version: float


@dataclass(slots=True)
class Sources:
    """Content of a source of weights.

    Attributes:
        path: file or folder.
        by_name: the tensors.
        aliases: other name -> name of tied ones.
        sums: range of a file -> CRC-32, where the format has such.
        states: sizes and times of the files.
    """

    path: Path
    by_name: dict[str, Source | Sliced] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    sums: dict[Extent, int] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    def add(self, name: str, shape: Sequence[int], values: Values, where: str) -> None:
        """Add a whole tensor.

        Raises:
            CheckpointError: one of that name is there.
        """
        length = shape[0] if shape else 1
        self.add_source(Source(name, tuple(shape), values.dtype, (Shard(values, ((0, length),), length),), 0, where))

    def add_source(self, source: Source | Sliced) -> None:
        """Add a tensor.

        Raises:
            CheckpointError: one of that name is there.
        """
        if source.name in self.by_name:
            msg = f"{self.path} has {source.name!r} twice: in {self.by_name[source.name].where} and in {source.where}"
            raise CheckpointError(msg)
        self.by_name[source.name] = source

    def files(self) -> set[str]:
        """The files that elements are read from through their places."""
        found = set[str]()
        for source in self.by_name.values():
            parts = source.slices if isinstance(source, Sliced) else ((s.length, s.values) for s in source.shards)
            found |= files_of(values for _, values in parts)
        return found

    def join(self, other: Sources) -> None:
        """Add all of another one."""
        for source in other.by_name.values():
            self.add_source(source)
        self.aliases |= other.aliases
        self.sums |= other.sums
        self.states |= other.states


def find_sources(path: Path, tag: str | None, dtype: torch.dtype | None, options: ReadOptions) -> Sources:
    """Open a file or folder of weights; no element is read, but where parts of a checkpoint have to agree.

    Args:
        path: file or folder.
        tag: of a folder of checkpoints.
        dtype: of which weights are preferred, where a checkpoint has them twice.
        options: for reading other programs' checkpoints.

    Raises:
        CheckpointError: it is not there, damaged, or cannot be read.
    """
    if is_ours(path, tag):
        with open_reader(path, tag) as reader:
            return of_checkpoint(reader, dtype)
    with noted() as notes:
        found = open_foreign(path, tag, options)
        return of_found(found, notes)


def is_ours(path: Path, tag: str | None) -> bool:
    """True for a folder with our checkpoints, or that of one tag."""
    if not path.is_dir():
        return False
    folders = [path / tag] if tag else [path, *_latest(path)]
    return any(
        (folder / schema.MANIFEST_FILE).is_file() and (folder / schema.MODEL_FILE).is_file() for folder in folders
    )


def _latest(path: Path) -> list[Path]:
    try:
        name = (path / schema.LATEST_FILE).read_text(errors="replace")[:4096].strip().splitlines()[0]
    except (OSError, IndexError):
        return []
    return [path / name] if Path(name).name == name else []


def of_found(found: Found, notes: Notes) -> Sources:
    """The weights and buffers of another program's checkpoint, by their places in its files.

    Raises:
        CheckpointError: elements are not aligned in their file, or a file has gone.
    """
    made, where = Sources(found.path, aliases=dict(found.aliases), sums=dict(notes.sums)), str(found.path)
    rows = [(name, param.shape, param.weight) for name, param in found.params.items()]
    rows += [(name, shape, values) for name, (shape, values) in found.buffers.items()]
    for name, shape, values in rows:
        placed = located(values, notes, name)
        made.add(name, shape, placed, next(iter(files_of([placed])), where))
    used = made.files()
    made.sums = {extent: crc for extent, crc in made.sums.items() if extent[0] in used}
    made.states = states_of(sorted(used))
    return made


def of_checkpoint(reader: Reader, dtype: torch.dtype | None) -> Sources:
    """The weights and buffers of one of our checkpoints.

    Raises:
        CheckpointError: a parameter has no weights in it.
    """
    made = Sources(reader.path, aliases=reader.aliases())
    for name in reader.names():
        made.add_source(_of_param(reader, name, dtype))
    for name in reader.buffers():
        entry = reader.stored(name, schema.BUFFER_SLOT)
        made.add(name, entry.shape, _in_file(reader, entry), str(reader.file_of(entry)))
    made.states = states_of(sorted(made.files()))
    return made


def _of_param(reader: Reader, name: str, dtype: torch.dtype | None) -> Source:
    info, slots = reader.info(name), reader.slots(name)
    entries = {slot: reader.stored(name, slot) for slot in slots}
    if WEIGHT16 in slots and (MASTER not in slots or schema.torch_dtype(entries[WEIGHT16].dtype) == dtype):
        chosen = WEIGHT16
    elif MASTER in slots:
        chosen = MASTER
    elif SHARD_SLOT.format(rank=0) in slots:
        return _of_shards(reader, info, entries, reader.state().get(SLICES))
    else:
        msg = f"{reader.path} has no weights of {name!r}, only {', '.join(slots) or 'its name'}"
        raise CheckpointError(msg)
    entry = entries[chosen]
    length = info.shape[0] if info.shape else 1
    shard = Shard(_in_file(reader, entry), ((0, length),), length)
    where = str(reader.file_of(entry))
    return Source(name, info.shape, schema.torch_dtype(entry.dtype), (shard,), 0, where)


def _of_shards(reader: Reader, info: ParamInfo, entries: Mapping[str, TensorEntry], slices: Any) -> Source:
    """A parameter of which there are slices.

    Raises:
        CheckpointError: they are not as the copy says.
    """
    known = slices.get(info.name) if isinstance(slices, Mapping) else None
    rows = _ranges(known, info.shape)
    if rows is None or len(rows[1]) != len(entries):
        msg = f"{reader.path} has {len(entries)} slices of {info.name!r} of shape {info.shape}, and says of them: "
        msg += f"{known!r:.200}"
        raise CheckpointError(msg)
    (dim, all_ranges), shards, where = rows, [], ""
    for rank, ranges in enumerate(all_ranges):
        entry, held = entries.get(SHARD_SLOT.format(rank=rank)), sum(stop - start for start, stop in ranges)
        rest = (*info.shape[:dim], *info.shape[dim + 1 :])
        fits = entry is not None and len(entry.shape) == len(info.shape) and entry.shape[dim] >= held
        if entry is None or not fits or (*entry.shape[:dim], *entry.shape[dim + 1 :]) != rest:
            what = "nothing" if entry is None else f"shape {entry.shape}"
            msg = f"{reader.path}: {info.name!r} of shape {info.shape} has {what} of rank {rank}, where {held} "
            msg += f"elements along dim {dim} are expected"
            raise CheckpointError(msg)
        shards.append(Shard(_in_file(reader, entry), ranges, entry.shape[dim]))
        where = str(reader.file_of(entry))
    dtype = schema.torch_dtype(next(iter(entries.values())).dtype)
    return Source(info.name, info.shape, dtype, tuple(shards), dim, where)


def _ranges(known: Any, shape: tuple[int, ...]) -> tuple[int, list[Ranges]] | None:
    """(dim, for each rank its ranges), if a copy says such of a parameter, and they cover it."""
    try:
        dim, rows = known["dim"], [tuple((start, stop) for start, stop in row) for row in known["ranges"]]
        ends = sorted(pair for row in rows for pair in row)
        reached = 0
        for start, stop in ends:
            if not 0 <= start <= min(stop, reached) or not isinstance(start, int) or not isinstance(stop, int):
                return None
            reached = max(reached, stop)
        return (dim, rows) if 0 <= dim < len(shape) and reached == shape[dim] else None
    except (TypeError, KeyError, ValueError):
        return None


def _in_file(reader: Reader, entry: TensorEntry) -> Values:
    label = f"{entry.name}/{entry.slot}"
    dtype, path = schema.torch_dtype(entry.dtype), str(reader.file_of(entry))
    return InFile(path, entry.offset, entry.numel, dtype, Blocks(label, reader.table(entry)))


def files_of(values: Iterable[Values]) -> set[str]:
    """The files that elements are read from through their places."""
    found: set[str] = set()
    for each in values:
        if isinstance(each, InFile):
            found.add(each.path)
        elif isinstance(each, Chain):
            found |= files_of(part for part, _, _ in each.links)
    return found
