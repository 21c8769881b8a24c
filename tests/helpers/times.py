"""What an engine says of the times of its passes: lines of the log, and series of the CSV monitor."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

NAMES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")

Rows = list[dict[str, float]]


def monitored(folder: Path) -> dict[str, Any]:
    """The section of a CSV monitor that `read_series` reads."""
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"}}


def timed_lines(records: Iterable[logging.LogRecord]) -> tuple[Rows, Rows]:
    """Milliseconds by name of the lines of micro-steps, and of those of steps."""
    texts = [record.getMessage() for record in records if record.getMessage().startswith("time (ms) | ")]
    rows = [{name: float(ms) for name, ms in re.findall(r"(\w+): (-?[\d.]+)", text)} for text in texts]
    return [row for row in rows if "fwd_microstep" in row], [row for row in rows if "fwd" in row]


def read_series(folder: Path, steps: int, samples_of_step: int) -> dict[str, list[float]]:
    """Milliseconds of all steps by name, checked: over samples, and times of sums are a part of the backward pass."""
    values = {}
    for name in NAMES:
        with (folder / "run" / f"Train_Samples_elapsed_time_ms_{name}.csv").open() as file:
            rows = [(int(x), float(value)) for x, value in list(csv.reader(file))[1:]]
        assert [x for x, _ in rows] == [samples_of_step * (step + 1) for step in range(steps)]
        values[name] = [value for _, value in rows]
    assert all(value > 0 for name in ("forward", "backward", "step") for value in values[name])
    for whole, inner, sums in zip(*(values[name] for name in NAMES[1:4]), strict=True):
        assert whole == pytest.approx(inner + sums)
        assert inner > 0
        assert sums >= 0
    return values
