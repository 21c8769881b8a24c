"""The records of a run in short: its state, its series, how ranks differ. Plain values, as for JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.base.plain import printable
from mpispeed.base.units import format_duration
from mpispeed.record.job_report import report_of
from mpispeed.record.reader import Record
from mpispeed.record.runs import STEP_SECONDS, Run
from mpispeed.record.series import Points

ENDED, FAILED, RUNNING, STOPPED = "ended", "failed", "running", "stopped"

OWN = ("Step/", "Ranks/", "Communication/", "Swap/")
"""Beginnings of names of series that records have besides those of monitors."""
RANK_SECONDS, RANK_WAITING = "Ranks/step_seconds", "Ranks/communication_seconds"
TRAFFIC = "Communication/"
"""Totals of verbs: Communication/VERB/AXES/calls, bytes and seconds."""

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
        state: ended, failed, running or stopped; said: the same in a sentence; lost: sentences about what is missing;
        steps, samples: the last; seconds_per_step: median; repeated: points that were left out; series: rows of
        `series_row`; ranks: rows of `spread`; slowest: `slowest_rank`; traffic: rows of `traffic`; notes: all, and the
        watchdog's reports beside records without an end.
    """
    infos = [info for info in run.series() if not info.name.startswith(TRAFFIC)]
    state, said = state_of(run.last, now)
    reports = [report_of(record, run.records) for record in run.records if not record.is_ended]
    notes = [*run.notes(), *(note for note in reports if note is not None)]
    return {
        "jobs": [job_row(record, state if record is run.last else _state_before(record)) for record in run.records],
        "state": state,
        "said": said,
        "lost": run.lost,
        "steps": int(run.rows["step"].max(initial=0)),
        "samples": int(run.rows["samples"].max(initial=0)),
        "repeated": len(run.written) - len(run.rows),
        "seconds_per_step": median(run.points(STEP_SECONDS).value) if STEP_SECONDS in run.names else None,
        "series": [series_row(run, info.name, info.ranks) for info in infos],
        "ranks": [spread(run, info.name, info.ranks) for info in infos if len(info.ranks) > 1],
        "slowest": slowest_rank(run),
        "traffic": traffic(run),
        "notes": notes,
    }


def state_of(record: Record, now: float) -> tuple[str, str]:
    """Whether the job of a record ended, runs or stopped without an end; and the same in a sentence."""
    last = last_written(record)
    age = now - last
    if record.is_ended:
        after = f"{when(last)} after {format_duration(max(0.0, last - record.started))}"
        return (FAILED, f"failed {after}{_reason(record)}") if _has_failed(record) else (ENDED, f"ended {after}")
    since = f"last written {format_duration(max(0.0, age))} ago, {when(last)}"
    report = report_of(record)
    if report is not None:
        first, _, _ = report["text"].partition("\n")
        return STOPPED, f"ended from outside, {when(report['time'])}: {printable(first, 200)}"
    if _is_gone(record):
        return STOPPED, f"stopped without an end, its process is gone: {since}"
    if age <= max(SILENT_SECONDS, _SILENT_GAPS * _gap(record)):
        return RUNNING, f"still running: {since}"
    return STOPPED, f"stopped without an end, as a job that was killed, or that hangs: {since}"


def _is_gone(record: Record) -> bool:
    """True if the process that wrote a record was on this machine and is there no more."""
    command = record.facts.get("command")
    pid = command.get("pid") if isinstance(command, Mapping) else None
    if record.host != os.uname().nodename or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    return Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists()


def _state_before(record: Record) -> str:
    if not record.is_ended:
        return STOPPED
    return FAILED if _has_failed(record) else ENDED


def _has_failed(record: Record) -> bool:
    return any(note["kind"] == "close" and note.get("state") == FAILED for note in record.notes())


def _reason(record: Record) -> str:
    faults = [note for note in record.notes() if note["kind"] == "fault"]
    return f": {printable(str(faults[-1].get('text', '')), 200)}" if faults else ""


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
        "first_step": int(steps.min()) if len(steps) else 0,
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


def slowest_rank(run: Run) -> dict[str, Any] | None:
    """The rank that others wait for: it spends the most of a step outside of communication.

    Returns:
        rank, seconds (its own part of a step, by the median of its rows) and median (of that of all ranks); None where
        there is one rank, or it was not measured.
    """
    ranks = next((info.ranks for info in run.series() if info.name == RANK_WAITING), ())
    if len(ranks) < 2 or RANK_SECONDS not in run.names:
        return None
    own = np.array(
        [median(run.points(RANK_SECONDS, r).value) - median(run.points(RANK_WAITING, r).value) for r in ranks]
    )
    if not np.isfinite(own).any():
        return None
    place = int(np.nanargmax(own))
    return {"rank": ranks[place], "seconds": float(own[place]), "median": median(own)}


def traffic(run: Run) -> list[dict[str, Any]]:
    """Totals of communication of rank 0, by verb and axes; the last job counts its own only.

    Returns:
        Rows with verb, axes, calls, bytes and seconds.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for info in run.series():
        parts = info.name.removeprefix(TRAFFIC).split("/")
        if info.name.startswith(TRAFFIC) and len(parts) == 3 and 0 in info.ranks:
            verb, axes, what = parts
            row = found.setdefault((verb, axes), {"verb": verb, "axes": axes})
            row[what] = float(run.points(info.name).value[-1])
    return [row for row in found.values() if {"calls", "bytes", "seconds"} <= row.keys()]


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


def strict(value: Any) -> Any:
    """A copy that any reader of JSON takes: numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
