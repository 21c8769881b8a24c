"""Partition of a row of weighted layers into stages. Integers and floats only; no ranks, no tensors.

A partition of n layers into p parts is a list of p + 1 borders: part i has the layers borders[i] to borders[i + 1] - 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from mpispeed.base.errors import StageError


def partition_uniform(count: int, parts: int) -> list[int]:
    """Cut `count` layers so that parts differ by at most one layer; the first ones are longer.

    Returns:
        parts + 1 borders. With fewer layers than parts the last parts are empty.

    Raises:
        StageError: a negative count, or no part.
    """
    _check(count, parts)
    if count <= parts:
        return [min(i, count) for i in range(parts + 1)]
    size, longer = divmod(count, parts)
    return [size * i + min(i, longer) for i in range(parts + 1)]


def partition_balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Partition with a small difference between the heaviest and the lightest part: DeepSpeed's rule.

    A dynamic programme over prefixes, greedy in that it keeps one partition of each prefix: the one with the smallest
    difference between its heaviest and its lightest part, the latest of equal ones.

    Returns:
        parts + 1 borders; with no more layers than parts those of `partition_uniform`.

    Raises:
        StageError: no part, or a weight that is negative or not finite.
    """
    _check(len(weights), parts)
    sums = _sums(weights)
    if len(weights) <= parts:
        return partition_uniform(len(weights), parts)
    n = len(weights)
    most = np.full((n + 1, parts + 1), np.inf)
    least = np.full((n + 1, parts + 1), np.inf)
    cut = np.zeros((n + 1, parts + 1), dtype=np.int64)
    most[0, 0] = 0.0
    for j in range(1, parts + 1):
        for i in range(j, n + 1):
            last = sums[i] - sums[j - 1 : i]  # of all cuts before the last part that leave no part empty
            highest, lowest = np.maximum(most[j - 1 : i, j - 1], last), np.minimum(least[j - 1 : i, j - 1], last)
            spreads = highest - lowest
            best = len(spreads) - 1 - int(np.argmin(spreads[::-1]))
            most[i, j], least[i, j], cut[i, j] = highest[best], lowest[best], best + j - 1
    return _borders(cut, n, parts)


def partition_bottleneck(
    weights: Sequence[float],
    parts: int,
    *,
    loads: Sequence[Sequence[float]] | None = None,
    slack: float = 0.0,
) -> list[int]:
    """Partition whose heaviest part is as light as possible (the linear partition problem).

    Of several, the one with the smallest sum of squares of parts; with `loads`, the one whose largest load is smallest.

    Args:
        weights: weight of each layer.
        parts: number of parts.
        loads: a second weight of each layer, one row for each part: a layer may weigh differently in each.
        slack: fraction by which the heaviest part may exceed the optimum in favour of the second aim.

    Returns:
        parts + 1 borders; with no more layers than parts those of `partition_uniform`.

    Raises:
        StageError: no part, or a weight that is negative or not finite.
    """
    _check(len(weights), parts)
    sums = _sums(weights)
    if len(weights) <= parts:
        return partition_uniform(len(weights), parts)

    def weight(j: int, first: int, stop: int) -> np.ndarray:
        return sums[stop] - sums[first:stop]

    # A hair of tolerance: the same layers may sum up a little differently from another start.
    limit = _best(weight, np.maximum, len(weights), parts)[0] * (1.0 + slack + 1e-12)
    if loads is None:

        def second(j: int, first: int, stop: int) -> np.ndarray:
            found = weight(j, first, stop)
            return np.where(found <= limit, found * found, np.inf)

        return _best(second, np.add, len(weights), parts)[1]
    rows = [_sums(row) for row in loads]

    def load(j: int, first: int, stop: int) -> np.ndarray:
        return np.where(weight(j, first, stop) <= limit, rows[j][stop] - rows[j][first:stop], np.inf)

    return _best(load, np.maximum, len(weights), parts)[1]


def _best(
    cost_of: Callable[[int, int, int], np.ndarray], join: np.ufunc, n: int, parts: int
) -> tuple[float, list[int]]:
    """The cheapest partition without empty parts, where costs of parts are combined by max or by a sum.

    `cost_of(j, first, stop)` has the costs of part j from each start in [first, stop) up to `stop`.
    """
    cost = np.full((n + 1, parts + 1), np.inf)
    cut = np.zeros((n + 1, parts + 1), dtype=np.int64)
    cost[0, 0] = 0.0
    for j in range(1, parts + 1):
        for i in range(j, n + 1):
            found = join(cost[j - 1 : i, j - 1], cost_of(j - 1, j - 1, i))
            best = len(found) - 1 - int(np.argmin(found[::-1]))
            cost[i, j], cut[i, j] = found[best], best + j - 1
    return float(cost[n, parts]), _borders(cut, n, parts)


def cut_by_method(
    method: str, names: Sequence[str], count_parameters: Callable[[], Sequence[int]], parts: int
) -> list[int]:
    """Cut layers by the name of a method, in any case.

    Args:
        method: "uniform"; "parameters" (or "best"): trainable parameters; "type:REGEX": layers whose name matches,
            searched without regard to case.
        names: class or function name of each layer.
        count_parameters: gives the trainable parameters of each layer; called only where they are needed.
        parts: number of parts.

    Raises:
        StageError: the method is unknown, the expression is none, or it matches no layer.
    """
    kind = method.lower()
    if kind == "uniform":
        return partition_uniform(len(names), parts)
    if kind in ("parameters", "best"):
        return partition_balanced(count_parameters(), parts)
    if kind.startswith("type:"):
        return partition_balanced(_matches(method[len("type:") :], names), parts)
    msg = f"partition_method={method!r} is unknown; choose 'uniform', 'parameters', 'best', 'type:REGEX' or 'profile'"
    raise StageError(msg)


def _matches(expression: str, names: Sequence[str]) -> list[int]:
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        msg = f"partition_method='type:{expression}': {expression!r} is no regular expression: {error}"
        raise StageError(msg) from error
    found = [int(pattern.search(name) is not None) for name in names]
    if not any(found):
        known = ", ".join(sorted(set(names)))
        msg = f"partition_method='type:{expression}' matches no layer; the layers are of the types {known}"
        raise StageError(msg)
    return found


def _borders(cut: np.ndarray, n: int, parts: int) -> list[int]:
    borders = [n]
    for j in range(parts, 0, -1):
        borders.append(int(cut[borders[-1], j]))
    return borders[::-1]


def _sums(weights: Sequence[float]) -> np.ndarray:
    """Sums of the first 0, 1, ... weights."""
    row = np.asarray(weights, dtype=np.float64)
    if row.size and not (np.isfinite(row).all() and row.min() >= 0):
        msg = f"weights of layers have to be finite and not negative, got {list(weights)}"
        raise StageError(msg)
    return np.concatenate([[0.0], np.cumsum(row)])


def _check(count: int, parts: int) -> None:
    if count < 0 or parts < 1:
        msg = f"{count} layers cannot be cut into {parts} parts; there has to be at least one part"
        raise StageError(msg)
