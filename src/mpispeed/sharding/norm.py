"""The global gradient norm, bitwise the same for every placement and number of ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.grads import GradStore
    from mpispeed.store.table import Unit

_SLOTS = 64
"""Doubles of a message: the last is a note, the others an exact sum. Non-overlapping doubles between 2^-300 and 2^300
number at most about 12."""


def compress(values: Iterable[float]) -> list[float]:
    """Non-overlapping doubles with exactly the same sum (Shewchuk 1997, grow-expansion).

    A non-finite input gives that one value.
    """
    partials: list[float] = []
    for value in values:
        if not math.isfinite(value):
            return [value]
        kept = 0
        high = value
        for other in partials:
            big, small = (high, other) if abs(high) >= abs(other) else (other, high)
            high = big + small
            low = small - (high - big)
            if low:
                partials[kept] = low
                kept += 1
        partials[kept:] = [high]
    return partials


def global_square_sum(
    mesh: Mesh, grads: GradStore, *, threads: int, counts: Callable[[Unit], bool] = lambda _: True, note: float = 0.0
) -> tuple[float, list[float]]:
    """Sum of squares of all averaged gradients, correctly rounded; inf or NaN if any gradient is.

    Each rank sums fixed blocks of its own shard in fp64; the block sums are added exactly, so neither sharding over the
    data axis nor the number of its ranks changes a bit. `counts` is true for units that this rank counts: parameters
    that several ranks of another axis hold alike are counted by one of them.

    Returns the sum and the `note` of every rank.

    Collective over: all ranks.
    """
    partials: list[float] = []
    for found in grads.square_sums(filter(counts, grads.table.units), threads=threads):
        partials = compress(partials + found)
    if len(partials) >= _SLOTS:
        msg = f"an exact sum of squares needs {len(partials)} doubles, more than the {_SLOTS - 1} that are exchanged"
        raise StoreError(msg)
    own = torch.zeros(_SLOTS, dtype=torch.float64)
    own[: len(partials)] = torch.tensor(partials, dtype=torch.float64)
    own[-1] = note
    comm = mesh[mesh.topology.names]
    everyone = torch.empty(_SLOTS * comm.size, dtype=torch.float64)
    comm.all_gather(everyone, own)
    table = everyone.view(comm.size, _SLOTS)
    sums, notes = table[:, :-1], table[:, -1].tolist()
    if not bool(torch.isfinite(sums).all()):
        return math.nan if bool(torch.isnan(sums).any()) else math.inf, notes
    return math.fsum(sums.flatten().tolist()), notes
