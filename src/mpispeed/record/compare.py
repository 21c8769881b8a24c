"""In what two runs differ, by their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpispeed.record.plot import Curve, Panel
from mpispeed.record.runs import Run
from mpispeed.record.summary import flat, median

LOSS_ENDING = "_loss"
"""What the last part of the names of losses ends with."""

OF_PROCESSES = frozenset({"command.pid", "environment.MPISPEED_RANK_PID", "environment.MPISPEED_SAID"})
"""Facts that no two runs have in common."""

_MISSING = "(none)"


@dataclass(frozen=True, slots=True)
class SeriesDifference:
    """A series of two runs, step by step; where a step has several points the last counts.

    Attributes:
        name: of the series.
        common: steps that both have.
        only: steps that only the first, and only the second run has.
        different: common steps whose values differ in a bit.
        first_different: the first of them; None if there is none.
        furthest: the largest distance of two values of a step; NaN if one is none.
        last: final values of both; NaN where there is none.
    """

    name: str
    common: int
    only: tuple[int, int]
    different: int
    first_different: int | None
    furthest: float
    last: tuple[float, float]

    @property
    def is_equal(self) -> bool:
        """Both have the same steps, at least one, and every bit of their values is the same."""
        return self.common > 0 and not any(self.only) and not self.different


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs.

    Attributes:
        facts: (path, value of the first, value of the second) of what was known at the start and differs.
        series: losses, or those that were asked for.
        steps: last steps.
        seconds: (name, median of the first, of the second) of series of times on rank 0.
    """

    facts: tuple[tuple[str, Any, Any], ...]
    series: tuple[SeriesDifference, ...]
    steps: tuple[int, int]
    seconds: tuple[tuple[str, float, float], ...]

    @property
    def is_equal(self) -> bool:
        """There are series to compare, and they are equal bit by bit."""
        return bool(self.series) and all(each.is_equal for each in self.series)

    def as_json(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "equal": self.is_equal,
            "facts": [{"name": name, "a": one, "b": other} for name, one, other in self.facts],
            "series": [
                {
                    "series": each.name,
                    "equal": each.is_equal,
                    "common_steps": each.common,
                    "only_a": each.only[0],
                    "only_b": each.only[1],
                    "different_steps": each.different,
                    "first_different_step": each.first_different,
                    "largest_difference": each.furthest,
                    "last_a": each.last[0],
                    "last_b": each.last[1],
                }
                for each in self.series
            ],
            "steps": list(self.steps),
            "seconds": [{"series": name, "a": one, "b": other} for name, one, other in self.seconds],
        }


def compare(one: Run, other: Run, names: Sequence[str] = (), seconds: Sequence[str] = ()) -> Comparison:
    """Compare facts, series and times on rank 0.

    Args:
        one: the first run.
        other: the second.
        names: of series; by default all losses that either has.
        seconds: names of series of times.
    """
    own = [{info.name for info in run.series() if 0 in info.ranks} for run in (one, other)]
    wanted = list(names) or sorted(name for name in own[0] | own[1] if is_loss(name))
    return Comparison(
        tuple(different_facts(one, other)),
        tuple(series_difference(one, other, name) for name in wanted),
        (int(one.rows["step"].max(initial=0)), int(other.rows["step"].max(initial=0))),
        tuple(
            (name, median(one.points(name).value), median(other.points(name).value))
            for name in seconds
            if name in own[0] and name in own[1]
        ),
    )


def is_loss(name: str) -> bool:
    """True for names of losses, as `Train/Samples/train_loss`."""
    return name.endswith(LOSS_ENDING)


def different_facts(one: Run, other: Run) -> list[tuple[str, Any, Any]]:
    """Values of facts that differ, by their path in both; of lists of one length the elements."""
    first, second = flat(one.facts), flat(other.facts)
    found = []
    for name in [*first, *(name for name in second if name not in first)]:
        values = first.get(name, _MISSING), second.get(name, _MISSING)
        if name not in OF_PROCESSES and not _same(*values):
            found += _elements(name, *values)
    return found


def _elements(name: str, one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
        return [(name, one, other)]
    pairs = enumerate(zip(one, other, strict=True))
    return [(f"{name}[{place}]", *pair) for place, pair in pairs if not _same(*pair)]


def _same(one: Any, other: Any) -> bool:
    is_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return is_nan or (type(one) is type(other) and bool(one == other))


def series_difference(one: Run, other: Run, name: str) -> SeriesDifference:
    """Compare a series on rank 0 step by step."""
    (steps, values), (other_steps, other_values) = by_step(one, name), by_step(other, name)
    common, own, others = np.intersect1d(steps, other_steps, assume_unique=True, return_indices=True)
    first, second = values[own], other_values[others]
    differs = first.view(np.uint64) != second.view(np.uint64)
    with np.errstate(over="ignore", invalid="ignore"):
        distances = np.abs(first[differs] - second[differs])
    return SeriesDifference(
        name,
        len(common),
        (len(steps) - len(common), len(other_steps) - len(common)),
        int(differs.sum()),
        int(common[differs][0]) if differs.any() else None,
        float(distances.max(initial=0.0)),
        (_last(values), _last(other_values)),
    )


def _last(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else math.nan


def by_step(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps, ascending and each once, and the last value that a series has on rank 0 for each."""
    if name not in run.names:
        return np.empty(0, np.uint64), np.empty(0)
    points = run.points(name)
    steps, places = np.unique(points.step[::-1], return_index=True)
    return steps, np.ascontiguousarray(points.value[::-1][places])


def panels(one: Run, other: Run, names: Sequence[str], labels: tuple[str, str]) -> list[Panel]:
    """A picture of each series, with a curve for each run that has it."""
    return [
        Panel(name, [Curve(label, *by_step(run, name)) for run, label in zip((one, other), labels, strict=True)])
        for name in names
    ]
