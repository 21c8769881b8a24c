"""Few cases instead of all: every pair of values, and every value on every number of ranks.

`MPISPEED_MATRIX=full` (`make matrix`) takes the whole product.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

IS_FULL = os.environ.get("MPISPEED_MATRIX") == "full"


def pairwise(*axes: Sequence[Any], fits: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Rows of the product of the axes that hold every pair of values of any two of them; only rows that `fit`."""
    if IS_FULL or len(axes) < 3:
        return [row for row in itertools.product(*axes) if fits(*row)]
    rows = [row[::-1] for row in itertools.product(*(range(len(axis)) for axis in reversed(axes)))]
    rows = [row for row in rows if fits(*(axis[index] for axis, index in zip(axes, row, strict=True)))]
    numbers: dict[tuple[int, ...], int] = {}
    sets = [_pairs(row, numbers) for row in rows]
    missing, found = (1 << len(numbers)) - 1, []
    while missing:
        best = max(range(len(rows)), key=lambda at: (sets[at] & missing).bit_count())  # the first of those of most
        missing &= ~sets[best]
        found.append(rows[best])
    return [tuple(axis[index] for axis, index in zip(axes, row, strict=True)) for row in sorted(found)]


def _pairs(row: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> int:
    """The pairs of values of a row as bits; `numbers` gets those of pairs that are new."""
    found = 0
    for (i, one), (j, two) in itertools.combinations(enumerate(row), 2):
        found |= 1 << numbers.setdefault((i, one, j, two), len(numbers))
    return found


def on_ranks(*axes: Sequence[Any], ranks: Sequence[int] = (1, 2, 3, 4)) -> list[Any]:
    """Parameters of a test, one for each axis: every pair of values, and of a value and a number of ranks."""
    return _marked([(size, tuple(values)) for size, *values in pairwise(ranks, *axes)])


def in_turn(cases: Sequence[Any], ranks: Sequence[int] = (1, 2, 3, 4)) -> list[Any]:
    """Parameters of a test: each case on some number of ranks, each number has a case; a tuple is several values."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    if IS_FULL:
        return _marked(list(itertools.product(ranks, rows)))
    count = max(len(rows), len(ranks))
    return _marked([(ranks[number % len(ranks)], rows[number % len(rows)]) for number in range(count)])


def _marked(found: list[tuple[int, tuple[Any, ...]]]) -> list[Any]:
    sizes: dict[str, tuple[tuple[Any, ...], list[int]]] = {}
    for size, values in found:
        sizes.setdefault(str(values), (values, []))[1].append(size)
    return [pytest.param(*values, marks=pytest.mark.ranks(*own)) for values, own in sizes.values()]
