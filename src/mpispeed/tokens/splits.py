"""Whole numbers in given proportions, and parts of a range by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from mpispeed.base.errors import ConfigError


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Share `total` out by weights: whole shares first, and one more for those with the largest remainders.

    No share is a whole one away from its exact value; of equal remainders the first one comes first. It is computed
    in exact fractions, so that all machines agree.

    Raises:
        ConfigError: weights that are negative, not finite, or all zero.
    """
    if not weights or not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        msg = f"weights {list(weights)!r:.200} give no proportions; use numbers of 0 or more, at least one above 0"
        raise ConfigError(msg)
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    shares = [total * weight / whole for weight in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number], number))
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


def split_range(count: int, split: Sequence[float] | None, part: int) -> tuple[int, int]:
    """Begin and end of a part of `count` items that are cut by weights, in their order; all of them without a split.

    Args:
        count: of the items.
        split: weights of the parts, such as (98, 1, 1).
        part: number of the part, from 0.

    Raises:
        ConfigError: there is no such part, or nothing is in it.
    """
    if split is None:
        if part:
            msg = f"part {part} is asked for without a split; give split=(98, 1, 1) or the like"
            raise ConfigError(msg)
        return 0, count
    if not 0 <= part < len(split):
        msg = f"there is no part {part} of a split into {len(split)}; parts are counted from 0"
        raise ConfigError(msg)
    counts = largest_remainder(count, split)
    if not counts[part]:
        msg = f"part {part} of {count} documents has none, split by {list(split)!r:.200}; use other weights"
        raise ConfigError(msg)
    begin = sum(counts[:part])
    return begin, begin + counts[part]
