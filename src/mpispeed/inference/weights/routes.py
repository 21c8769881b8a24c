"""Ways of the elements of a part of a tensor into the slice that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.inference.weights.sources import Source
from mpispeed.nn.tensor import TensorCut


@dataclass(frozen=True, slots=True)
class Route:
    """The way of the elements of a part. Both sides are seen as `rows` of so many elements.

    Attributes:
        rows: as many in the part as in the slice.
        row: elements of a row of the part.
        to_row: elements of a row of the slice.
        segments: (start, stop, to): elements [start, stop) of each row of the part go to `to` of that of the slice.
    """

    rows: int
    row: int
    to_row: int
    segments: tuple[tuple[int, int, int], ...]

    def is_used(self, first: int, last: int) -> bool:
        """True if some of the elements [first, last) of the part go into the slice."""
        return next(self._moves(first, last), None) is not None

    def direct(self, first: int, last: int) -> int | None:
        """The first element of the slice, if [first, last) all go there one behind the other; else None."""
        if self.segments == ((0, self.row, 0),) and (self.row == self.to_row or self.rows == 1):
            return first
        turn, start = divmod(first, self.row)
        stop = start + last - first
        for begin, end, to in self.segments:
            if begin <= start and stop <= end:
                return turn * self.to_row + to + start - begin
        return None

    def one_range(self) -> tuple[int, int] | None:
        """The elements [first, last) of the part that are the slice, as it is; None if it has others too or none."""
        if len(self.segments) != 1:
            return None
        start, stop, to = self.segments[0]
        is_full = self.rows == 1 or (start, stop) == (0, self.row)
        if not is_full or to or stop - start != self.to_row:
            return None
        return start, start + self.rows * self.to_row

    def place(self, target: torch.Tensor, first: int, values: torch.Tensor) -> None:
        """Copy the elements of the part from `first` on, those of the slice, converting them to its dtype.

        Shapes:
            target: the slice, contiguous
            values: one-dimensional
        """
        flat = target.view(-1)
        for turns, start, stop, to in self._moves(first, first + values.numel()):
            if turns == 1:
                flat[to : to + stop - start].copy_(values[start - first : stop - first])
                continue
            source = values[start - first :].as_strided((turns, stop - start), (self.row, 1))
            flat.as_strided((turns, stop - start), (self.to_row, 1), flat.storage_offset() + to).copy_(source)

    def _moves(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """(rows, start, stop, to): the elements [start, stop) of the first of so many rows, and where they go."""
        if first >= last:
            return
        top, bottom = -(-first // self.row), last // self.row
        if top > bottom:  # inside of one row
            yield from self._within(bottom, first - bottom * self.row, last - bottom * self.row)
            return
        if top * self.row > first:
            yield from self._within(top - 1, first - (top - 1) * self.row, self.row)
        if bottom > top:
            for begin, end, to in self.segments:
                yield bottom - top, top * self.row + begin, top * self.row + end, top * self.to_row + to
        if bottom * self.row < last:
            yield from self._within(bottom, 0, last - bottom * self.row)

    def _within(self, turn: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        for begin, end, to in self.segments:
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield 1, turn * self.row + low, turn * self.row + high, turn * self.to_row + to + low - begin


def routes(source: Source, cut: TensorCut | None, rank: int, size: int) -> list[Route]:
    """The ways of all parts of a source into the slice of rank `rank` of `size`, in the order of the parts.

    Raises:
        CheckpointError: the files have the tensor in parts along another dim than the ranks.
    """
    dim = source.dim if cut is None else cut.dim
    if len(source.shards) > 1 and source.dim != dim:
        msg = f"{source.where} has {source.name!r} of shape {source.shape} in parts along dim {source.dim}, and ranks "
        msg += f"hold it in parts along dim {dim}; load it with the model whole, and save it again"
        raise CheckpointError(msg)
    shape = source.shape or (1,)
    length = shape[dim]
    wanted = [(0, length)] if cut is None else cut.ranges(rank, size)
    held = length if cut is None else cut.local_shape(rank, size)[dim]
    rows, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    made = []
    for shard in source.shards:
        ranges, own = (shard.ranges, shard.length) if dim == source.dim else (((0, length),), length)
        segments = tuple((a * inner, b * inner, to * inner) for a, b, to in _common(ranges, wanted))
        made.append(Route(rows, max(own * inner, 1), held * inner, segments))
    return made


def _common(have: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, to): what the part from its position `start` on has of what is wanted, touching ones as one."""
    held: tuple[int, int, int] | None = None
    begin = 0
    for low, high in have:
        to = 0
        for start, stop in wanted:
            first, last = max(low, start), min(high, stop)
            if first < last:
                found = (begin + first - low, begin + last - low, to + first - start)
                if held is not None and held[1] == found[0] and held[2] + held[1] - held[0] == found[2]:
                    held = (held[0], found[1], held[2])
                else:
                    if held is not None:
                        yield held
                    held = found
            to += stop - start
        begin += high - low
    if held is not None:
        yield held
