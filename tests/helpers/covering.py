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
    missing = set().union(*map(_pairs, rows))
    found = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))  # the first of those that bring most
        missing -= _pairs(best)
        found.append(best)
    return [tuple(axis[index] for axis, index in zip(axes, row, strict=True)) for row in sorted(found)]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


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
