"""Division of files into pieces, and of pieces among the ranks of a node and in time: plain data, alike everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mpispeed.ckpt.foreign.in_file import InFile
from mpispeed.ckpt.foreign.mapping import Extent
from mpispeed.ckpt.foreign.values import Chain, Values
from mpispeed.ckpt.format import schema
from mpispeed.inference.weights.sources import Source

PIECE_BYTES = schema.BLOCK_BYTES
"""Most that is read at a time: a block of our checkpoints, which has a checksum."""

READERS = 2
"""Most ranks that read at the same time for others, so that shared memory is as small as containers have it."""

_PRIVATE_BYTES = 8 << 20
"""About as much as a rank reads for itself between two meetings."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that are read at once.

    Attributes:
        leaf: what they are read from.
        first, last: elements of it.
        pair: position of the pair of tensors; -1: they are only compared with a checksum.
        shard: part of the source.
        at: position of the first one in that part.
        extent: the range with a checksum that they are in, all of which is read once; None for none.
    """

    leaf: Values
    first: int
    last: int
    pair: int = -1
    shard: int = 0
    at: int = 0
    extent: Extent | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return (self.last - self.first) * self.leaf.dtype.itemsize

    @property
    def is_checked(self) -> bool:
        """True if there is a checksum of it."""
        return self.extent is not None or (isinstance(self.leaf, InFile) and self.leaf.blocks is not None)


Users = tuple[tuple[int, ...], tuple[int, ...]]
"""Ranks that copy some of a piece, and ranks that use some of it where it is."""


@dataclass(slots=True)
class Slot:
    """Pieces that one rank reads into shared memory, one behind the other."""

    reader: int
    pieces: list[Piece] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, piece: Piece) -> None:
        """Add a piece, at a multiple of 64 bytes."""
        self.starts.append(-(-self.nbytes // 64) * 64)
        self.pieces.append(piece)
        self.nbytes = self.starts[-1] + piece.nbytes


@dataclass(slots=True)
class Round:
    """Reads between two meetings of a node's ranks.

    Attributes:
        slots: shared pieces.
        private: rank -> pieces that it alone needs, and reads for itself.
        done: positions of pairs that are complete with this round.
    """

    slots: list[Slot] = field(default_factory=list)
    private: dict[int, list[Piece]] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)

    def pairs(self) -> Iterator[int]:
        """Positions of the pairs that have pieces in it."""
        for pieces in (*(slot.pieces for slot in self.slots), *self.private.values()):
            yield from (piece.pair for piece in pieces if piece.pair >= 0)


def make_pieces(sources: Sequence[Source], sums: Mapping[Extent, int]) -> list[Piece]:
    """All that is to be read, in the order of files; ranges with a checksum that are not read as a whole once more."""
    pieces = [piece for pair, source in enumerate(sources) for piece in _of_source(pair, source)]
    covered: dict[Extent, list[tuple[int, int]]] = {}
    for piece in pieces:
        extent = _extent(piece.leaf)
        if extent is not None and extent in sums:
            first = piece.first * piece.leaf.dtype.itemsize
            covered.setdefault(extent, []).append((first, first + piece.nbytes))
    exact = {extent for extent, parts in covered.items() if _is_whole(sorted(parts), extent[2] - extent[1])}
    made = [replace(piece, extent=extent) if (extent := _extent(piece.leaf)) in exact else piece for piece in pieces]
    for extent in sorted(sums.keys() - exact):
        leaf = InFile(extent[0], extent[1], extent[2] - extent[1], torch.uint8)
        made += [Piece(leaf, first, last, extent=extent) for first, last in _cut(leaf, 0, leaf.numel)]
    return sorted(made, key=_place)


def _is_whole(parts: Sequence[tuple[int, int]], size: int) -> bool:
    """True if the ranges are [0, size), each byte once."""
    starts, stops = [0, *(stop for _, stop in parts)], [*(start for start, _ in parts), size]
    return starts == stops


def _extent(leaf: Values) -> Extent | None:
    return (leaf.path, leaf.offset, leaf.offset + leaf.nbytes) if isinstance(leaf, InFile) else None


def _place(piece: Piece) -> tuple[str, int, int, int]:
    leaf = piece.leaf
    if isinstance(leaf, InFile):
        return leaf.path, leaf.offset + piece.first * leaf.dtype.itemsize, piece.pair, piece.at
    return "", 0, piece.pair, piece.at


def _of_source(pair: int, source: Source) -> Iterator[Piece]:
    for number, shard in enumerate(source.shards):
        for leaf, first, last, at in _leaves(shard.values, 0, shard.values.numel, 0):
            for start, stop in _cut(leaf, first, last):
                yield Piece(leaf, start, stop, pair, number, at + start - first)


def _leaves(values: Values, first: int, last: int, at: int) -> Iterator[tuple[Values, int, int, int]]:
    """(values that are no chain, first, last, position of the first in the whole)."""
    if not isinstance(values, Chain):
        if last > first:
            yield values, first, last, at
        return
    begin = 0
    for part, start, stop in values.links:
        low, high = max(first - begin, 0), min(last - begin, stop - start)
        if low < high:
            yield from _leaves(part, start + low, start + high, at + begin + low - first)
        begin += stop - start


def _cut(leaf: Values, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Elements [first, last) cut at multiples of the size of pieces."""
    step = PIECE_BYTES // leaf.dtype.itemsize
    while first < last:
        stop = min(last, (first // step + 1) * step)
        yield first, stop
        first = stop


def make_rounds(pieces: Sequence[Piece], users: Callable[[Piece], Users], size: int, pairs: int) -> list[Round]:
    """Deal pieces to the ranks of a node.

    Args:
        pieces: in order.
        users: ranks of the node that copy some of a piece, and ranks that use it in the mapped file. Where there are
            only such, one of them compares its checksum, if it has one.
        size: ranks of the node.
        pairs: number of pairs; those without elements are complete at the end.
    """
    rounds, turn, alone = [Round()], 0, 0
    held = dict[int, int]()
    for piece, (wanted, mapped) in _interleaved(pieces, users):
        current = rounds[-1]
        if not wanted and not piece.is_checked:
            continue
        if len(wanted) <= 1:
            able = wanted or mapped or range(size)
            rank = able[alone % len(able)]
            alone += not wanted
            if held.get(rank, 0) >= _PRIVATE_BYTES:
                current, held = _next(rounds), {}
            current.private.setdefault(rank, []).append(piece)
            held[rank] = held.get(rank, 0) + (piece.nbytes if wanted else piece.nbytes // 4)  # those take no memory
            continue
        if not current.slots or current.slots[-1].nbytes + 64 + piece.nbytes > PIECE_BYTES:
            if len(current.slots) == min(size, READERS):
                current, held = _next(rounds), {}
            current.slots.append(Slot(turn % size))
            turn += 1
        current.slots[-1].add(piece)
    last = {pair: number for number, each in enumerate(rounds) for pair in each.pairs()}
    for pair in range(pairs):
        rounds[last.get(pair, len(rounds) - 1)].done.append(pair)
    return rounds


def _interleaved(pieces: Sequence[Piece], users: Callable[[Piece], Users]) -> Iterator[tuple[Piece, Users]]:
    """Pieces with the ranks that need some of them; those of one tensor so that all ranks have to read."""
    for _, group in itertools.groupby(pieces, lambda piece: piece.pair):
        lanes: dict[Users, list[Piece]] = {}
        for piece in group:
            lanes.setdefault(users(piece), []).append(piece)
        for row in itertools.zip_longest(*lanes.values()):
            yield from ((piece, wanted) for piece, wanted in zip(row, lanes, strict=True) if piece is not None)


def _next(rounds: list[Round]) -> Round:
    rounds.append(Round())
    return rounds[-1]
