"""Points of a run, handed to what monitors write with."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpispeed.record.runs import Run


@dataclass(frozen=True, slots=True)
class Target:
    """A sink of monitors: `write(series, value, samples, time)`, time in Unix seconds, and what closes it."""

    write: Callable[[str, float, int, float], None]
    close: Callable[[], None]


def selected(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that patterns select, in their order; all without patterns.

    A pattern is a name, shell-style, or a part of names.
    """
    if not patterns:
        return list(names)
    found = {name for pattern in patterns for name in _fitting(names, pattern)}
    return [name for name in names if name in found]


def _fitting(names: Sequence[str], pattern: str) -> list[str]:
    if pattern in names:
        return [pattern]
    if any(sign in pattern for sign in "*?["):
        return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    return [name for name in names if pattern in name]


def feed(run: Run, target: Target, names: Sequence[str], *, rank: int = 0, by_series: bool = False) -> int:
    """Write all points of some series to a sink, as monitors of the run did: also those of steps that were repeated.

    Args:
        run: the records.
        target: closed at the end.
        names: of series.
        rank: whose points.
        by_series: one series after the other, closed after each, for a sink that has a file open for each. Otherwise
            in the order of time.

    Returns:
        The number of points.

    Raises:
        OSError: the sink cannot write.
    """
    wanted = set(names)
    places = np.array([number for number, name in enumerate(run.names) if name in wanted], np.uint32)
    rows = run.written
    rows = rows[(rows["rank"] == rank) & np.isin(rows["series"], places)]
    if by_series:
        rows = rows[np.argsort(rows["series"], kind="stable")]
    last: Any = None
    try:
        fields = (rows[name].tolist() for name in ("series", "value", "samples", "time"))
        for series, value, samples, seconds in zip(*fields, strict=True):
            if by_series and last not in (None, series):
                target.close()
            target.write(run.names[series], value, samples, seconds)
            last = series
    finally:
        target.close()
    return len(rows)
