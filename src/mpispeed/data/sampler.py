"""The order of samples: a pure function of (seed, epoch, position), and a rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mpispeed.base.keyed_order import mix, permuted, seed_word


class SampleOrder:
    """An endless stream of data set indices: one permutation of the data set per epoch.

    Position `p` lies in epoch `p // length`. Permutations are computed index by index, so an epoch of
    any length costs no memory.
    """

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        if length < 0:
            msg = f"length {length} of a data set is negative"
            raise ValueError(msg)
        self.length, self.seed, self.shuffle = length, seed, shuffle

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
        keys = mix(mix(epochs + np.uint64(1)) ^ seed_word(self.seed))
        return [int(index) for index in permuted(offsets, np.uint64(self.length), keys)]


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


class SlotBatches:
    """The micro-batches of one rank from a point of an epoch to its end, by the slots that it has in each update.

    The update that begins at `base` takes `unit` consecutive positions, and slot `i` the `i`-th `micro_batch` of them,
    whichever rank has it. Positions past the end of the epoch wrap to its beginning.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        epoch: int,
        base: int,
        done: int,
        count: int,
        micro_batch: int,
        each: int,
        unit: int,
        slot_of: Callable[[int], int],
    ) -> None:
        """Args: `done` micro-steps came since `base`, `each` are in an update; `slot_of` gives the slot of each."""
        self._order, self._first, self._base, self._done, self._count = order, epoch * order.length, base, done, count
        self._micro_batch, self._each, self._unit, self._slot_of = micro_batch, each, unit, slot_of

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        length = self._order.length
        for step in range(self._done, self._done + self._count):
            update, micro_step = divmod(step, self._each)
            start = self._base + update * self._unit + self._slot_of(micro_step) * self._micro_batch
            yield self._order.indices([self._first + o % length for o in range(start, start + self._micro_batch)])
