"""Sorts pairs (value, number of sample) over ranks, so that ranks hold consecutive parts of nearly equal lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpispeed.curriculum.metrics import Ids

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

_LEAST_SAMPLES = 100


@dataclass
class Pairs:
    """Values of samples and their numbers, [n] each."""

    values: Ids
    ids: Ids

    def take(self, index: Ids) -> Pairs:
        """Some of the pairs."""
        return Pairs(self.values[index], self.ids[index])

    def ordered(self) -> Pairs:
        """The same, sorted by value, then by number."""
        return self.take(np.lexsort((self.ids, self.values)))

    def groups(self) -> tuple[Ids, Ids]:
        """Different values of sorted pairs, and how many pairs have each."""
        values, counts = np.unique(self.values, return_counts=True)
        return values, counts.astype(np.int64)


def sorted_pairs(comm: Comm, pairs: Pairs) -> Pairs:
    """This rank's part of all pairs in order. Collective over: `comm`.

    Regular sampling (Shi and Schaeffer, 1992) of pairs, not of values: pairs with one value are spread over ranks as
    well. With n pairs on each of P ranks a rank gets at most 2 n + P of them.
    """
    mine = pairs.ordered()
    if comm.size == 1:
        return mine
    cuts = [0, *_cuts(mine, _splitters(comm, mine)), len(mine.ids)]
    counts = np.diff(cuts)
    sent, coming = torch.from_numpy(counts), torch.empty(comm.size, dtype=torch.int64)
    comm.all_to_all(coming, sent)
    received = coming.tolist()

    def exchange(x: Ids) -> Ids:
        out = torch.empty(sum(received), dtype=torch.int64)
        comm.all_to_all(out, torch.from_numpy(x), received, counts.tolist())
        return out.numpy()

    return Pairs(exchange(mine.values), exchange(mine.ids)).ordered()


def _splitters(comm: Comm, mine: Pairs) -> Pairs:
    """The first pair of each rank but the first."""
    count = max(_LEAST_SAMPLES, comm.size)
    own = torch.zeros(2 * count + 1, dtype=torch.int64)  # at last: whether there are any
    if len(mine.ids):
        some = mine.take((2 * np.arange(count, dtype=np.int64) + 1) * len(mine.ids) // (2 * count))
        own = torch.from_numpy(np.concatenate((some.values, some.ids, np.ones(1, np.int64))))
    everyone = torch.empty(comm.size * own.numel(), dtype=torch.int64)
    comm.all_gather(everyone, own)
    rows = everyone.numpy().reshape(comm.size, -1)
    rows = rows[rows[:, -1] == 1]
    samples = Pairs(rows[:, :count].reshape(-1), rows[:, count:-1].reshape(-1)).ordered()
    return samples.take(np.arange(1, comm.size, dtype=np.int64) * len(samples.ids) // comm.size)


def _cuts(mine: Pairs, splitters: Pairs) -> list[int]:
    """How many pairs come before each splitter."""
    left = np.searchsorted(mine.values, splitters.values, "left")
    right = np.searchsorted(mine.values, splitters.values, "right")
    spans = zip(left, right, splitters.ids, strict=True)
    return [int(begin + np.searchsorted(mine.ids[begin:end], number)) for begin, end, number in spans]
