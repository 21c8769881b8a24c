"""Tasks that the tuner gives to its worker job, and replies that come back, as lines of JSON in two files of a folder.

The tuner appends to `tasks.jsonl`, rank 0 to `replies.jsonl`; a line counts when it has its end. Both files are there
before the job: clients of a network file system see what was appended to a known file at once, and new names late.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Kind = Literal["survey", "trial", "stop"]
Status = Literal["ok", "error", "hang", "killed", "memory", "skipped"]

TASKS, REPLIES = "tasks.jsonl", "replies.jsonl"

OBSERVERS = (
    "tensorboard", "csv_monitor", "wandb", "comet", "comms_logger", "flops_profiler", "trace", "run_record",
)  # fmt: skip
"""Sections of what only observes a run; trials do without."""

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 0.5
_POLL_SHARE = 0.02  # of a wait that may pass before its end is seen


@dataclass(frozen=True, slots=True)
class Task:
    """One run of the script.

    Attributes:
        number: unique within a job, ascending from 1; `WorkerJob` sets it.
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
            memory), `activation_bytes` (held from forward to backward for one micro-batch), `sent_bytes` (by the engine
            in a step, to other ranks), `steps` (that were measured), `train_batch_size`, and with the metric "flops"
            `FLOPS_per_gpu` (per second and rank).
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


@dataclass(frozen=True, slots=True)
class Reply:
    """A line of the worker job.

    Attributes:
        kind: "ready" for the next task; "outcome" of one; "leaving": after that, the job takes no other task.
        number: of the task that is over; 0 at the start of the job.
        outcome: of the task.
        step: the number of this job as a step of SLURM, such as 12.3; "" elsewhere.
    """

    kind: Literal["ready", "outcome", "leaving"]
    number: int = 0
    outcome: Outcome | None = None
    step: str = ""


def append(path: Path, value: Task | Reply) -> None:
    """Add a line; it is with whoever reads the file when this returns.

    Raises:
        OSError: the file is not there, or cannot be written.
    """
    line = json.dumps(asdict(value)).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        rest = memoryview(line)
        while rest:  # on a full file system a part may be written, and the next call says why
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whatever it was before: settings may hold keys of services."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


def pause(began: float) -> None:
    """Sleep until the next look at a file: longer the longer a wait takes, which keeps file servers at rest.

    Args:
        began: when the wait began, by `time.monotonic`.
    """
    time.sleep(min(max(POLL_SECONDS, _POLL_SHARE * (time.monotonic() - began)), LONGEST_POLL_SECONDS))


class Lines:
    """Reads what another process appends to a file. Each look opens it again, as network file systems ask for."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines that were not read yet.

        Raises:
            OSError: the file has gone.
        """
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(json.loads, whole.splitlines())


def reply_of(line: Mapping[str, Any]) -> Reply:
    """The reply of a line."""
    outcome = line["outcome"]
    return Reply(**{**line, "outcome": None if outcome is None else Outcome(**outcome)})
