"""The records of a run in short: its state, its series, how ranks differ. Plain values, as for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np

from mpispeed.base.units import format_duration
from mpispeed.record.reader import Record
from mpispeed.record.runs import Run
from mpispeed.record.series import Points

ENDED, RUNNING, STOPPED = "ended", "running", "stopped"

SILENT_SECONDS = 60.0
"""A record that is older has to be explained by the time between its points."""
_SILENT_GAPS = 10
"""A run whose points are farther apart is silent after so many times their distance."""
_TENTH = 10
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def summary(run: Run, now: float) -> dict[str, Any]:
    """What happened.

    Args:
        run: the records.
        now: Unix seconds.

    Returns:
        jobs: one row for each file (file, run, host, started, seconds, first_step, last_step, state);
        state: ended, running or stopped; said: the same in a sentence; lost: sentences about what is missing;
        steps, samples: the last; series: rows of `series_row`; ranks: rows of `spread`; notes: all of them.
    """
    state, said = state_of(run.last, now)
    return {
        "jobs": [job_row(record, state if record is run.last else _state_before(record)) for record in run.records],
        "state": state,
        "said": said,
        "lost": run.lost,
        "steps": int(run.rows["step"].max(initial=0)),
        "samples": int(run.rows["samples"].max(initial=0)),
        "repeated": len(run.written) - len(run.rows),
        "series": [series_row(run, info.name, info.ranks) for info in run.series()],
        "ranks": [spread(run, info.name, info.ranks) for info in run.series() if len(info.ranks) > 1],
        "notes": run.notes(),
    }


def state_of(record: Record, now: float) -> tuple[str, str]:
    """Whether the job of a record ended, runs or stopped without an end; and the same in a sentence."""
    last = last_written(record)
    age = now - last
    if record.is_ended:
        return ENDED, f"ended {when(last)} after {format_duration(max(0.0, last - record.started))}"
    since = f"last written {format_duration(max(0.0, age))} ago, {when(last)}"
    if age <= max(SILENT_SECONDS, _SILENT_GAPS * _gap(record)):
        return RUNNING, f"still running: {since}"
    return STOPPED, f"stopped without an end, as a job that was killed, or that hangs: {since}"


def _state_before(record: Record) -> str:
    return ENDED if record.is_ended else STOPPED


def last_written(record: Record) -> float:
    """Time of the newest point or note, in Unix seconds."""
    times = record.rows["time"]
    times = times[np.isfinite(times)]
    return max([record.started, *times[-1000:].tolist(), *(float(note["time"]) for note in record.notes()[-100:])])


def _gap(record: Record) -> float:
    """Median of seconds between points of different steps, at the end of a record; 0 where there are too few."""
    times = np.unique(record.rows["time"][-1000:])
    times = times[np.isfinite(times)]
    return float(np.median(np.diff(times))) if len(times) > 2 else 0.0


def job_row(record: Record, state: str) -> dict[str, Any]:
    """One file: where and when its job ran, and which steps it did."""
    steps = record.rows["step"]
    steps = steps[steps > 0]
    return {
        "file": str(record.path),
        "run": record.run,
        "host": record.host,
        "started": record.started,
        "seconds": last_written(record) - record.started,
        "first_step": int(steps.min(initial=0)) if not len(steps) else int(steps.min()),
        "last_step": int(steps.max(initial=0)),
        "state": state,
    }


def series_row(run: Run, name: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Statistics of a series on its lowest rank.

    Returns:
        series, ranks (how many have it), points, not_finite, first_step, last_step, and of values: first, last, min,
        max, tail (mean of the last tenth of points); min, max and tail are of finite values, NaN where there are none.
    """
    points = run.points(name, ranks[0])
    finite = points.value[np.isfinite(points.value)]
    return {
        "series": name,
        "ranks": len(ranks),
        "points": len(points),
        "not_finite": len(points) - len(finite),
        "first_step": int(points.step[0]),
        "last_step": int(points.step[-1]),
        "first": float(points.value[0]),
        "last": float(points.value[-1]),
        "min": float(finite.min(initial=math.inf)) if len(finite) else math.nan,
        "max": float(finite.max(initial=-math.inf)) if len(finite) else math.nan,
        "tail": tail_mean(points),
    }


def tail_mean(points: Points) -> float:
    """Mean of the finite values among the last tenth of points, at least one; NaN where there are none."""
    values = points.value[-max(1, len(points) // _TENTH) :]
    return mean(values)


def mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN where there are none."""
    finite = values[np.isfinite(values)]
    # each is divided first, because a sum of large values may be no float
    return float((finite / len(finite)).sum()) if len(finite) else math.nan


def median(values: np.ndarray) -> float:
    """Median of the finite values; NaN where there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def spread(run: Run, name: str, ranks: Sequence[int]) -> dict[str, Any]:
    """How ranks differ in a series, by the median of each.

    Returns:
        series, ranks (how many), median (of those of ranks), lowest and highest with lowest_rank and highest_rank.
    """
    own = np.array([median(run.points(name, rank).value) for rank in ranks])
    if np.isnan(own).all():
        low = high = 0
    else:
        low, high = int(np.nanargmin(own)), int(np.nanargmax(own))
    return {
        "series": name,
        "ranks": len(ranks),
        "median": median(own),
        "lowest": float(own[low]),
        "lowest_rank": ranks[low],
        "highest": float(own[high]),
        "highest_rank": ranks[high],
    }


def when(seconds: float) -> str:
    """A time for people, in UTC; "?" where it is none that calendars have."""
    try:
        return (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError):
        return "?"


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Values of nested objects of JSON by their path, as zero_optimization.stage; lists and empty objects stay."""
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{path}.{key}" if path else str(key))
    return found


def facts_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A label and a line of text for each fact."""
    return [
        (name, ", ".join(f"{key}={text(inner)}" for key, inner in flat(value).items())) for name, value in facts.items()
    ]


def text(value: Any) -> str:
    """A value on one line."""
    return value if isinstance(value, str) else json.dumps(value)


def strict(value: Any) -> Any:
    """A copy that any reader of JSON takes: numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
