"""Tasks that the tuner gives to its worker job, and outcomes that come back; both travel as JSON files.

The folder of a job has `tasks/NUMBER.json`, written by the tuner, and `outcomes/NUMBER.json`, written by rank 0. Both
are renamed into their places, so that a reader sees a whole file or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from mpispeed.base.errors import UsageError

Kind = Literal["survey", "trial", "stop"]
Status = Literal["ok", "error", "hang", "killed", "memory", "skipped"]

TASKS, OUTCOMES = "tasks", "outcomes"


@dataclass(frozen=True, slots=True)
class Task:
    """One run of the script.

    Attributes:
        number: unique within a folder, ascending.
        kind: "trial" measures; "survey" stops in `initialize`, and predicts there; "stop" ends the job.
        name: of the trial, for messages.
        folder: takes ds_config.json, stdout.log and stderr.log of this run; "" for none.
        config: all settings of the run; they also win over those that the script gives in code.
        arguments: words of the script in place of those it was started with; None for the same.
        first_step: the global step, counted from 1, with which the measurement begins.
        last_step: the last one that is measured; the run ends after it.
        metric: what the tuner wants; "flops" costs a counted pass outside of the measured steps.
        payload: of a survey: the candidates, a list of configs.
    """

    number: int
    kind: Kind
    name: str = ""
    folder: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] | None = None
    first_step: int = 3
    last_step: int = 5
    metric: str = "throughput"
    payload: Any = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one task.

    Attributes:
        name: of the task.
        status: "ok"; "error": the script raised or left; "hang": over its limit of time, or ranks that waited for each
            other; "memory": out of memory; "killed": a rank was lost by something else; "skipped": it was not run.
        reason: one sentence for everything but "ok".
        metrics: of a trial, for whole steps and the slowest rank; units: seconds and bytes. `latency` of a global step,
            `throughput` (samples per second), `fwd` and `bwd` of a micro-batch, `step` of an update, `peak_bytes` and
            `base_bytes` (resident memory of a process at its peak, and before the trial; on an accelerator of its
            memory), `activation_bytes` (held from forward to backward for one micro-batch), `steps` (that were
            measured), `train_batch_size`, and with the metric "flops" `FLOPS_per_gpu` (per second and rank).
        survey: what the survey found.
        seconds: that the task took, with the start of a job if it needed one.
    """

    name: str
    status: Status
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    survey: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Runs(Protocol):
    """Interface of `WorkerJob`, for the one who searches."""

    def run(self, task: Task, limit_seconds: float | None = None) -> Outcome:
        """Run one task to its end, whatever that is; None: a limit from the trials before."""

    def close(self) -> None:
        """End the job, if one runs."""


def task_file(folder: Path, number: int) -> Path:
    """The place of a task's file."""
    return folder / TASKS / f"{number}.json"


def outcome_file(folder: Path, number: int) -> Path:
    """The place of the file of a task's outcome."""
    return folder / OUTCOMES / f"{number}.json"


def write(path: Path, value: Task | Outcome) -> None:
    """Write a file that is whole as soon as it can be seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(value)))
    unfinished.replace(path)


def read_task(path: Path) -> Task | None:
    """The task of a file; None as long as there is no file.

    Raises:
        UsageError: the file holds no task.
    """
    found = _read(path, Task)
    return None if found is None else Task(**found)


def read_outcome(path: Path) -> Outcome | None:
    """The outcome of a file; None as long as there is no file.

    Raises:
        UsageError: the file holds no outcome.
    """
    found = _read(path, Outcome)
    return None if found is None else Outcome(**found)


def _read(path: Path, kind: type[Task | Outcome]) -> dict[str, Any] | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.keys() != kind.__dataclass_fields__.keys():
        msg = f"{path} holds no {kind.__name__.lower()} of this version of mpispeed; give the tuner an empty folder"
        raise UsageError(msg)
    return values
