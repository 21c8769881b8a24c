"""Tables of the ranges that ranks hold of tensors: rows of equal, equally spaced runs. Integers only; no torch.

A row is (tensor, start, stop, stride, count): the elements [start + i * stride, stop + i * stride) of a tensor for each
i below count. A plain range has stride 0 and count 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

COLUMNS = 5

TENSOR, START, STOP, STRIDE, COUNT = range(COLUMNS)


def table(rows: Iterable[tuple[int, int, int, int, int]]) -> np.ndarray:
    """The rows that are not empty.

    Shapes:
        result: int64 [rows, 5]
    """
    made = np.array(list(rows), np.int64).reshape(-1, COLUMNS)
    kept: np.ndarray = made[(made[:, START] < made[:, STOP]) & (made[:, COUNT] > 0)]
    return kept


def joined(tables: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The tables of all ranks as one sorted by tensor, and the rank of each row.

    Shapes:
        result: int64 [rows, 5], int64 [rows]
    """
    kept = list(tables)
    counts = [len(one) for one in kept]
    rows = np.concatenate([np.empty((0, COLUMNS), np.int64), *kept])
    ranks = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(rows[:, TENSOR], kind="stable")
    return rows[order], ranks[order]


def expanded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every single run of a table: the number of its row, its start and its stop; sorted by start, then stop.

    Shapes:
        result: three of int64 [runs]
    """
    counts = rows[:, COUNT]
    source = np.repeat(np.arange(len(rows)), counts)
    turn = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = rows[source, START] + turn * rows[source, STRIDE]
    stops = starts + (rows[source, STOP] - rows[source, START])
    order = np.lexsort((stops, starts))
    return source[order], starts[order], stops[order]


def meeting(rows: np.ndarray, low: int, high: int) -> np.ndarray:
    """Rows reduced to the full runs that intersect [low, high); rows without any are left out.

    Shapes:
        result: int64 [rows, 5]
    """
    stride = np.maximum(rows[:, STRIDE], 1)
    # run i meets it if its stop is above low and its start below high
    first = np.where(rows[:, STOP] > low, 0, (low - rows[:, STOP]) // stride + 1)
    last = np.where(rows[:, START] < high, (high - 1 - rows[:, START]) // stride + 1, 0)
    last = np.minimum(last, rows[:, COUNT])
    cut = rows.copy()
    cut[:, START] += first * rows[:, STRIDE]
    cut[:, STOP] += first * rows[:, STRIDE]
    cut[:, COUNT] = last - first
    kept: np.ndarray = cut[cut[:, COUNT] > 0]
    return kept


def run_counts(tables: Iterable[np.ndarray], tensors: int) -> np.ndarray:
    """Number of runs of each tensor.

    Shapes:
        result: int64 [tensors]
    """
    counts = np.zeros(tensors, np.int64)
    for one in tables:
        np.add.at(counts, one[:, TENSOR], one[:, COUNT])
    return counts
