"""The order of samples: a pure function of (seed, epoch, position), and a rank's part of it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_ROUNDS = 8  # four suffice for a good mix of large ranges; short epochs need more
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(words: Words) -> Words:
    """Scramble 64-bit words, one to one (the finaliser of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


class SampleOrder:
    """An endless stream of data set indices: one permutation of the data set per epoch.

    Position `p` lies in epoch `p // length`. Permutations are computed index by index (a Feistel
    cipher on a grid that just holds the data set), so an epoch of any length costs no memory and
    the order does not change with the version of a random number library.
    """

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        if length < 0:
            msg = f"length {length} of a data set is negative"
            raise ValueError(msg)
        self.length, self.seed, self.shuffle = length, seed, shuffle
        rows = isqrt(length - 1) + 1 if length else 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-length // rows) or 1)

    def index(self, position: int) -> int:
        """Data set index of the sample at global stream position `position`."""
        return self.indices([position])[0]

    def indices(self, positions: list[int] | range) -> list[int]:
        """Data set indices of many stream positions.

        Raises:
            IndexError: a position is negative, or the data set is empty.
        """
        if not len(positions):
            return []
        if min(positions) < 0 or not self.length:
            msg = f"no sample stands at position {min(positions)} of a data set of {self.length} samples"
            raise IndexError(msg)
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.uint64), np.uint64(self.length))
        if not self.shuffle:
            return [int(offset) for offset in offsets]
        seed = np.uint64((self.seed * _GOLDEN) & _MASK)
        keys = _mix(_mix(epochs + np.uint64(1)) ^ seed)
        found = self._permute(offsets, keys)
        # The grid has a few cells more than samples; walking on from those keeps the map one to one.
        while (outside := found >= np.uint64(self.length)).any():
            found[outside] = self._permute(found[outside], keys[outside])
        return [int(index) for index in found]

    def _permute(self, cells: Words, keys: Words) -> Words:
        """Map the cells of the grid one to one onto themselves, differently for every key."""
        columns, rows = np.divmod(cells, self._rows)
        for turn in range(_ROUNDS):
            salted = keys + np.uint64((turn + 1) * _GOLDEN & _MASK)
            if turn % 2:
                columns = (columns + _mix(rows ^ salted) % self._columns) % self._columns
            else:
                rows = (rows + _mix(columns ^ salted) % self._rows) % self._rows
        found: Words = columns * self._rows + rows
        return found


class RankBatches:
    """The micro-batches of one rank from a point of an epoch to its end, as lists of data set indices.

    Micro-step `k` of the group takes `micro_batch * size` consecutive positions, and rank `r` the
    `r`-th slice of `micro_batch` of them. Positions past the end of the epoch wrap to its beginning,
    so that every rank makes the same number of micro-steps.
    """

    def __init__(
        self, order: SampleOrder, *, epoch: int, offset: int, count: int, micro_batch: int, rank: int, size: int
    ) -> None:
        self._order, self._first, self._offset, self._count = order, epoch * order.length, offset, count
        self._micro_batch, self._rank, self._size = micro_batch, rank, size

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        block, length = self._micro_batch * self._size, self._order.length
        for step in range(self._count):
            start = self._offset + step * block + self._rank * self._micro_batch
            yield self._order.indices([self._first + o % length for o in range(start, start + self._micro_batch)])
