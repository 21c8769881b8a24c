"""Owners of matrices, and rounds of matrices that are under way together. Pure: the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MATRICES_UNDER_WAY = 2
"""Of the size of the largest matrix: so much an owner has of one round, unless a unit has more for it."""

LEAST_ELEMENTS = 1 << 20
"""An owner may have so many elements of a round whatever the matrices are, so that small ones share messages."""


def work_of(rows: int, columns: int, count: int = 1) -> float:
    """Work of making `count` matrices orthogonal, in multiplications but for a factor: n m min(n, m)."""
    return float(count) * rows * columns * min(rows, columns)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Owners of matrices.

    Attributes:
        owners: index of the owner of each matrix, in the order given.
        loads: work of each owner.
    """

    owners: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The largest owner's work by the mean; 1 if there is none."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def deal(works: Sequence[float], owners: int) -> Ownership:
    """Give each matrix to the owner with least work so far, the largest matrices first.

    The largest owner's work is at most 4/3 of the least possible. Source: Graham, "Bounds on multiprocessing timing
    anomalies", 1969.

    Args:
        works: of the matrices.
        owners: number of ranks.
    """
    loads, found = [0.0] * owners, [0] * len(works)
    for index in sorted(range(len(works)), key=lambda at: (-works[at], at)):
        owner = min(range(owners), key=lambda at: (loads[at], at))
        found[index] = owner
        loads[owner] += works[index]
    return Ownership(tuple(found), tuple(loads))


def rounds_of(units: Sequence[Sequence[tuple[int, int]]], *, least: int = LEAST_ELEMENTS) -> list[list[int]]:
    """Units whose matrices travel together: as many neighbours as keep what each owner has of a round small.

    Args:
        units: (owner, elements) of each matrix, by unit.
        least: an owner's share of a round that is always allowed.

    Returns:
        Positions of the units of each round, in order.
    """
    largest = max((size for unit in units for _, size in unit), default=0)
    most = max(MATRICES_UNDER_WAY * largest, least)
    found: list[list[int]] = []
    held: dict[int, int] = {}
    for position, unit in enumerate(units):
        joined = dict(held)
        for owner, size in unit:
            joined[owner] = joined.get(owner, 0) + size
        if found and max(joined.values(), default=0) <= most:
            found[-1].append(position)
            held = joined
        else:
            found.append([position])
            held = {}
            for owner, size in unit:
                held[owner] = held.get(owner, 0) + size
    return found
