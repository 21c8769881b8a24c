"""Plan of a load: for each tensor of a model what files have of it, who reads it, and whether it has to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.in_file import Files, InFile
from mpispeed.inference.weights.names import Matched
from mpispeed.inference.weights.routes import Route, routes
from mpispeed.inference.weights.schedule import Piece, Round, Users, make_pieces, make_rounds
from mpispeed.inference.weights.sources import Source, Sources
from mpispeed.inference.weights.targets import Target
from mpispeed.mesh.comm import Comm
from mpispeed.store.mounts import mount_of

Place = tuple[int, int]
"""Rank in a slicing group, and its size."""


LEAST_MAPPED_BYTES = 64 << 10
"""Smaller tensors are copied."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A slice that a file has as it is."""

    leaf: InFile
    first: int
    last: int

    def within(self, files: Files) -> torch.Tensor:
        """The mapped elements."""
        size, leaf = self.leaf.dtype.itemsize, self.leaf
        content = files.mapped(leaf.path)
        return content[leaf.offset + self.first * size : leaf.offset + self.last * size].view(leaf.dtype)


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the model, and the ways of the parts of its source to this rank's slice.

    Attributes:
        mapped: where the slice is in a file, if it is used from there.
    """

    target: Target
    routes: list[Route]
    mapped: Mapped | None


def make_plan(
    node: Comm, tensor: Comm, matched: Matched, sources: Sources, *, mapped: bool | None
) -> tuple[list[Pair], list[Round]]:
    """The pairs in order, and the schedule; equal on all ranks of the node but for the slices.

    Collective over: `node`.

    Raises:
        CheckpointError: parts do not fit, or the ranks are in slicing groups of different sizes; on all ranks.
    """
    places: list[Place] = node.gather_objects((tensor.rank, tensor.size))
    own = places[node.rank]
    ways: list[dict[Place, list[Route]]] = []
    with node.together(CheckpointError):
        if len({size for _, size in places}) > 1:
            msg = f"the ranks of a node have slicing groups of different sizes: {[size for _, size in places]}"
            raise CheckpointError(msg)
        for target, source in matched.pairs:
            ways.append({place: routes(source, target.cut, *place) for place in dict.fromkeys(places)})
    allowed = _Allowed(mapped)
    pairs = [
        Pair(target, way[own], _mapped(target, source, way[own]) if allowed.in_files_of(source) else None)
        for (target, source), way in zip(matched.pairs, ways, strict=True)
    ]
    flags = node.gather_objects(bytes(pair.mapped is not None for pair in pairs))
    pieces = make_pieces([source for _, source in matched.pairs], sources.sums)
    return pairs, make_rounds(pieces, _Askers(places, ways, flags), node.size, len(pairs))


def _mapped(target: Target, source: Source, ways: Sequence[Route]) -> Mapped | None:
    """The place of a slice in a file, if all of it lies there in one piece and in its dtype."""
    used = [(shard.values, way) for shard, way in zip(source.shards, ways, strict=True) if way.segments]
    if len(used) != 1 or not target.held.is_meta or source.dtype != target.dtype:
        return None
    (leaf, way), size = used[0], source.dtype.itemsize
    found = way.one_range()
    if not isinstance(leaf, InFile) or found is None or leaf.dtype != target.dtype or leaf.dtype == torch.bool:
        return None
    first, last = found
    if (leaf.offset + first * size) % size or (last - first) * size < LEAST_MAPPED_BYTES:
        return None
    return Mapped(leaf, first, last)


class _Allowed:
    """Tells whether files are to be mapped; those of other nodes may change or go away behind the model."""

    def __init__(self, mapped: bool | None) -> None:
        self._mapped = mapped
        self._known: dict[Path, bool] = {}

    def in_files_of(self, source: Source) -> bool:
        """True if the files of a tensor may be mapped."""
        if self._mapped is not None:
            return self._mapped
        folder = Path(source.where).parent
        if folder not in self._known:
            self._known[folder] = not mount_of(folder).is_network
        return self._known[folder]


class _Askers:
    """The ranks of the node that need some of a piece."""

    def __init__(
        self, places: Sequence[Place], ways: Sequence[dict[Place, list[Route]]], flags: Sequence[bytes]
    ) -> None:
        self._places, self._ways, self._flags = places, ways, flags

    def __call__(self, piece: Piece) -> Users:
        if piece.pair < 0:
            return (), ()
        last = piece.at + piece.last - piece.first
        used = {place: found[piece.shard].is_used(piece.at, last) for place, found in self._ways[piece.pair].items()}
        ranks = [rank for rank, place in enumerate(self._places) if used[place]]
        copying = tuple(rank for rank in ranks if not self._flags[rank][piece.pair])
        return copying, tuple(rank for rank in ranks if self._flags[rank][piece.pair])
