"""Runs fault drills on a user's script, each in a folder of its own, and checks the files that are left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpispeed.base.errors import CheckpointError, UsageError
from mpispeed.ckpt.tools import ls
from mpispeed.ckpt.tools.diff import diff
from mpispeed.ckpt.tools.show import open_location
from mpispeed.ckpt.tools.verify import verify_all, verify_location
from mpispeed.drill.catalog import FAILS, Check, Drill, Files, Outcome, Result, check_end

PLACE = "{dir}"
"""Placeholder for a drill's folder among the arguments of the script."""

_NOT_FOR_DRILLS = ("MPISPEED_INJECT", "MPISPEED_WATCH", "MPISPEED_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Other faults, no watchdog, and marks that a fault has happened before: in a job that SLURM has requeued."""

_LATE_SECONDS = 2.0
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of drills.

    `command` starts the script, `arguments` go to it, and `resume_arguments` follow them when it resumes.
    """

    command: Sequence[str]
    arguments: Sequence[str]
    resume_arguments: Sequence[str]
    folder: Path
    rank: int
    limit_seconds: float
    watch_seconds: float
    hang_seconds: float
    rtol: float = 0.0

    @property
    def has_files(self) -> bool:
        """True if checkpoints of a drill are kept apart from those of others, so that they can be looked at."""
        return any(PLACE in word for word in self.arguments)


@dataclass(frozen=True, slots=True)
class Reference:
    """The run without a fault: where its checkpoints are, and the steps at which they were saved."""

    folder: Path | None = None
    steps: tuple[int, ...] = field(default=())

    @property
    def step(self) -> int:
        """A step behind the first checkpoint, if there are several."""
        return self.steps[0] + 1 if len(self.steps) > 1 else 2

    @property
    def saves(self) -> int:
        """Number of saved checkpoints."""
        return max(1, len(self.steps))


def run_reference(settings: Settings) -> Reference:
    """Run the script without a fault.

    Raises:
        UsageError: it fails by itself, or saves nothing although it has a folder to save in.
    """
    folder = settings.folder / "reference"
    outcome = start(settings, folder, "output.txt", "")
    if outcome.code != 0:
        how = f"still ran after {settings.limit_seconds:.0f} s" if outcome.code is None else f"exit code {outcome.code}"
        msg = f"the script fails without any fault ({how}); its output is in {folder / 'output.txt'}"
        raise UsageError(msg)
    if not settings.has_files:
        return Reference()
    saved = find_checkpoints(folder)
    if saved is None:
        msg = f"the script was given {folder / 'files'} for {PLACE} and left no checkpoint there; see its output"
        raise UsageError(msg)
    return Reference(saved, tuple(sorted({row["step"] for row in ls.rows(saved) if row["step"] is not None})))


def run_drill(drill: Drill, settings: Settings, reference: Reference) -> Result:
    """Run the script with a fault, check the outcome, let it resume, and compare."""
    late = settings.watch_seconds + _LATE_SECONDS
    inject = drill.inject.format(rank=settings.rank, step=reference.step, last=reference.saves, late=f"{late:g}")
    result, folder, begin = Result(drill.name, inject, drill.what), settings.folder / drill.name, time.monotonic()
    outcome = start(settings, folder, "output.txt", inject)
    result.checks += check_end(drill, outcome, settings.rank, settings.limit_seconds)
    if not settings.has_files:
        result.notes.append(f"checkpoints were not looked at: no argument of the script contains {PLACE}")
    elif outcome.code is not None:
        result.checks += _check_files(drill, settings, reference, folder)
    result.seconds = time.monotonic() - begin
    return result


def start(settings: Settings, folder: Path, output: str, inject: str, more: Sequence[str] = ()) -> Outcome:
    """Run the script once and keep its output; at the limit it is killed."""
    files, run = folder / "files", folder / "run"
    for each in (files, run):
        each.mkdir(parents=True, exist_ok=True)
    words = [word.replace(PLACE, str(files)) for word in (*settings.arguments, *more)]
    environment = {
        **os.environ,
        "MPISPEED_RUN_DIR": str(run),
        "MPISPEED_WATCH_SECONDS": f"{settings.watch_seconds:g}",
        "MPISPEED_HANG_TIMEOUT": f"{settings.hang_seconds:g}",
    }
    for name in _NOT_FOR_DRILLS:
        environment.pop(name, None)
    if inject:
        environment["MPISPEED_INJECT"] = inject
    begin = time.monotonic()
    with (folder / output).open("w+b") as file:
        process = subprocess.Popen(
            [*settings.command, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(settings.limit_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        file.seek(0)
        text = file.read().decode(errors="replace")
    return Outcome(code, text, time.monotonic() - begin)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run, politely first: a launcher takes its ranks along then."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)


def find_checkpoints(folder: Path) -> Path | None:
    """The folder of checkpoints below a drill's folder: the one with a `latest` file."""
    found = sorted((folder / "files").rglob("latest"), key=lambda path: len(path.parts))
    return found[0].parent if found else None


def _check_files(drill: Drill, settings: Settings, reference: Reference, folder: Path) -> Iterator[Check]:
    saved = find_checkpoints(folder)
    if drill.files is Files.DAMAGED:
        yield from _check_damage(settings, saved, folder)
        return
    if saved is not None:
        yield _check_whole(saved)
    elif len(reference.steps) > 1:
        yield Check("last checkpoint", False, "there is none")
    if drill.files is Files.FINITE:
        return
    if drill.end == FAILS:
        again = start(settings, folder, "resumed.txt", "", settings.resume_arguments)
        yield Check("goes on", again.code == 0, f"exit code {again.code}; see {folder / 'resumed.txt'}")
        if again.code != 0:
            return
    yield _check_same(settings, reference, find_checkpoints(folder))


def _check_whole(saved: Path) -> Check:
    """Check that every checkpoint published below a folder is complete; unfinished saves are not published."""
    try:
        reports = [verify_location(str(saved)), *verify_all(saved)]
    except CheckpointError as error:
        return Check("last checkpoint", False, str(error))
    bad = [f"{report.tag} is {report.status}" for report in reports if report.status == "corrupt"]
    if reports[0].odd:
        bad.append(f"{reports[0].odd[0][0]} has elements that are not a number")
    return Check("last checkpoint", not bad, "; ".join(bad) or f"{reports[0].tag} is whole")


def _check_damage(settings: Settings, saved: Path | None, folder: Path) -> Iterator[Check]:
    if saved is None:
        yield Check("verify finds it", False, "there is no checkpoint")
        return
    try:
        report = verify_location(str(saved))
        status, detail = report.status, report.problems[0].text() if report.problems else "verify says it is whole"
    except CheckpointError as error:
        status, detail = "corrupt", str(error)
    yield Check("verify finds it", status != "ok", detail)
    again = start(settings, folder, "resumed.txt", "", settings.resume_arguments)
    yield Check("loading refuses it", again.code not in (0, None), f"exit code {again.code}")


def _check_same(settings: Settings, reference: Reference, saved: Path | None) -> Check:
    if saved is None or reference.folder is None:
        return Check("same result", False, "there is no checkpoint to compare")
    try:
        with open_location(str(reference.folder)) as first, open_location(str(saved)) as second:
            found = diff(first, second, rtol=settings.rtol)
            steps = f"the states at steps {first.global_step} and {second.global_step}"
    except CheckpointError as error:
        return Check("same result", False, str(error))
    if found.is_equal:
        return Check("same result", True, f"{steps} are equal")
    odd = [row.name for row in found.rows if row.change != "equal"] + found.added + found.removed
    largest = max((row.tally.max_abs for row in found.rows if row.tally), default=0.0)
    return Check("same result", False, f"{steps} differ in {len(odd)} tensors, {odd[0]} first, by up to {largest:.3g}")
