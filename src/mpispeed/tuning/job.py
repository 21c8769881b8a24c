"""The worker job, seen from the tuner: started when it is needed, watched, ended as a whole, and started again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from mpispeed.base.commands import run_command
from mpispeed.base.errors import UsageError
from mpispeed.launch import srun
from mpispeed.launch.command import Launch, plan_launch, start_launch, takes_srun
from mpispeed.launch.options import Wishes
from mpispeed.launch.program import runner
from mpispeed.launch.torch_env import TORCH_ENV
from mpispeed.tuning import steps
from mpispeed.tuning.processes import end_all
from mpispeed.tuning.protocol import (
    REPLIES,
    TASKS,
    Kind,
    Lines,
    Outcome,
    Reply,
    Status,
    Task,
    append,
    pause,
    reply_of,
    write_private,
)
from mpispeed.watchdog.exits import Groups, describe_exit_code
from mpispeed.watchdog.report import WATCHING, wait_for_watchers

START_SECONDS = 600.0
"""Time for a job to start: a batch system may take its time for a step, and a file system for the imports."""

FIRST_SECONDS = 1800.0
"""Limit of a trial as long as none has ended well, and of each survey."""

TIMES_LONGEST, LEAST_SECONDS = 5.0, 60.0
"""After that the limit is so many times what the longest good one took, and not less than so many seconds."""

FAILED_SECONDS = 45.0
"""Time for the other ranks to follow one that has failed, and for the watchdog to see that they do not."""

WATCH_SECONDS = "10"
"""Seconds until a proven hang is named: trials are short."""

TIDY_SECONDS = 60.0
"""Time for the job to get ready for the next task after an outcome."""

STOP_SECONDS, TERM_SECONDS, WATCHER_SECONDS = 10.0, 8.0, 5.0
SAID = "MPISPEED_SAID"  # of watchdog.report; its value is another for each job
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class _Running:
    """One job that was started."""

    process: subprocess.Popen[bytes]
    launch: Launch
    folder: Path
    lines: Lines
    groups: Groups
    kills: int | None
    step: str = ""
    replies: list[Reply] = field(default_factory=list)
    tasks: int = 0
    is_leaving: bool = False

    def look(self) -> None:
        """Read new replies."""
        for line in self.lines.new():
            reply = reply_of(line)
            self.replies.append(reply)
            self.step = self.step or reply.step
            self.is_leaving |= reply.kind == "leaving"

    def has(self, kind: str, number: int) -> Reply | None:
        """A reply, if it has come."""
        return next((r for r in self.replies if r.kind == kind and r.number == number), None)


class WorkerJob:
    """Runs tasks in a job of ranks; another job is started after a task that has ended one.

    Use it as a context: the job ends with it, also by Ctrl-C, SIGTERM and SIGHUP.
    """

    def __init__(
        self, words: Sequence[str], ranks: int | None, folder: Path, *, mpi: str = "auto", wishes: Wishes | None = None,
        is_debug: bool = False,
    ) -> None:  # fmt: skip
        """Nothing is started yet.

        Args:
            words: the script and its arguments, or -m, a module and its arguments.
            ranks: as for `plan_launch`; None: as many as hosts or a SLURM job have.
            folder: takes a folder for each job that is started, with its output and reports.
            mpi: as for `plan_launch`.
            wishes: hosts, launcher, binding and variables, as for `mpispeed run`.
            is_debug: as for `plan_launch`.
        """
        self._words, self._ranks, self._folder = tuple(words), ranks, folder.absolute()  # scripts go elsewhere
        self._mpi, self._wishes, self._is_debug = mpi, wishes or Wishes(), is_debug
        self._running: _Running | None = None
        self._longest = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> WorkerJob:
        def leave(number: int, _frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        for number in _ENDINGS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, leave)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def plan(self) -> Launch:
        """The start of the job, without its folder: for `--dry-run`.

        Raises:
            ConfigError: an option is not possible.
            UsageError: there is no launcher.
        """
        return self._plan(self._next_folder())

    def run(self, task: Task, limit_seconds: float | None = None) -> Outcome:
        """Run one task to its end, whatever that is; starts a job if none is there.

        Args:
            task: its number is set here; with a `folder`, ds_config.json is written there.
            limit_seconds: the longest that the script may take; None: a multiple of the longest good one.

        Raises:
            ConfigError: an option of the launcher is not possible.
            UsageError: there is no launcher, or the job cannot be started.
            OSError: a folder cannot be written.
        """
        began = time.monotonic()
        running = self._ready()
        running.tasks += 1
        place = str(Path(task.folder).absolute()) if task.folder else ""
        task = replace(task, number=running.tasks, folder=place)
        _prepare(task)
        given = time.monotonic()
        append(running.folder / TASKS, task)
        limit = limit_of(task.kind, self._longest) if limit_seconds is None else limit_seconds
        outcome = self._wait(running, task, limit)
        if outcome.status == "ok" and task.kind == "trial":
            self._longest = max(self._longest, time.monotonic() - given)
        return replace(outcome, seconds=time.monotonic() - began)

    def close(self) -> None:
        """End the job, if one runs: it is asked first, and then made to."""
        running = self._running
        if running is None:
            return
        is_between = running.tasks == 0 or running.has("outcome", running.tasks) is not None
        try:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                if is_between and self._gets_ready(running, running.tasks, STOP_SECONDS):
                    append(running.folder / TASKS, Task(running.tasks + 1, "stop"))
                    running.process.wait(STOP_SECONDS)
        finally:  # also when another Ctrl-C ends the wait
            self._end(running)

    # -- a job -------------------------------------------------------------------------------------------------------

    def _ready(self) -> _Running:
        """A job that waits for a task."""
        running = self._running
        if running is not None and not self._gets_ready(running, running.tasks, TIDY_SECONDS):
            self._end(running)
            running = None
        if running is None:
            running = self._start()
            if not self._gets_ready(running, 0, START_SECONDS):
                is_over = running.process.poll() is not None
                code = self._end(running)
                what = f"it ended with exit code {code}" if is_over else f"it was not ready after {START_SECONDS:.0f} s"
                log = running.folder / "stderr.log"
                msg = f"the worker job did not start: {what}; see {log}{_tail(log)}"
                raise UsageError(msg)
        return running

    def _gets_ready(self, running: _Running, number: int, limit_seconds: float) -> bool:
        began = time.monotonic()
        while time.monotonic() < began + limit_seconds:
            running.look()
            if running.has("ready", number):
                return True
            if running.is_leaving or running.process.poll() is not None:
                return False
            pause(began)
        return False

    def _plan(self, folder: Path) -> Launch:
        wishes, more = self._wishes, {"MPISPEED_RUN_DIR": str(folder)}
        if "MPISPEED_WATCH_SECONDS" not in os.environ:
            more["MPISPEED_WATCH_SECONDS"] = WATCH_SECONDS
        environ = steps.outside(os.environ)
        # The step shares the cores of its allocation with the tuner, which may run in a step itself.
        if takes_srun(wishes.launcher, environ) and srun.is_inside_allocation(environ):
            wishes = replace(wishes, extra=("--overlap", *wishes.extra))
        flags = [TORCH_ENV] if wishes.has_torch_env else []
        program = [sys.executable, *runner(), "-m", "mpispeed.tuning.worker", *flags, str(folder), "--", *self._words]
        launch = plan_launch(
            program, None if wishes.hosts else self._ranks, mpi=self._mpi, is_debug=self._is_debug, environ=environ,
            wishes=replace(wishes, variables={**wishes.variables, **more}),
        )  # fmt: skip
        launch = steps.leaving(launch, os.environ, environ)
        return replace(launch, added={**launch.added, SAID: str(folder / "watch" / "said")})

    def _next_folder(self) -> Path:
        """A folder that no job has had, of this tuner or of one before."""
        return next(path for n in itertools.count(1) if not (path := self._folder / f"job-{n}").exists())

    def _start(self) -> _Running:
        folder = self._next_folder()
        launch = self._plan(folder)
        (folder / "watch").mkdir(parents=True, exist_ok=True)
        for name in (TASKS, REPLIES):
            write_private(folder / name, "")
        (folder / "watch" / WATCHING).touch()
        with _logs(folder) as (out, err):
            process = start_launch(launch, list(self._handlers), out=out, err=err)
        groups = Groups.of(process.pid)
        kills = groups.kills(groups.limiting()[0])
        lines = Lines(folder / REPLIES)
        self._running = _Running(process, launch, folder, lines, groups, kills)
        return self._running

    def _end(self, running: _Running) -> int:
        """End a job as a whole; returns the exit code of its launcher. What a signal cuts short, `close` does again."""
        if running.process.poll() is None:
            running.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(TERM_SECONDS)
        if running.process.poll() is None:
            _cancel(running.step)
            running.process.kill()
        end_all(f"{SAID}={running.launch.added[SAID]}")
        code = running.process.wait()
        self._running = None
        return code

    # -- a task ------------------------------------------------------------------------------------------------------

    def _wait(self, running: _Running, task: Task, limit_seconds: float) -> Outcome:
        """Wait for the outcome of a task, or for the end of the job."""
        began, failed_since = time.monotonic(), None
        while True:
            running.look()
            reply = running.has("outcome", task.number)
            if reply is not None and reply.outcome is not None:
                return reply.outcome
            if running.process.poll() is not None:
                return self._explain(running, task)
            now = time.monotonic()
            if failed_since is None and _failures(running.folder, task.number):
                failed_since = now
            if now > began + limit_seconds or (failed_since is not None and now > failed_since + FAILED_SECONDS):
                self._end(running)
                text = f"the trial was ended after {limit_seconds:.0f} s, its limit, and so was its job"
                where = running.folder / "report.txt"
                more = f"; the last operations of its ranks are in {where}" if where.exists() else ""
                return _told(running.folder, task) or Outcome(task.name, "hang", text + more)
            pause(began)

    def _explain(self, running: _Running, task: Task) -> Outcome:
        """The outcome of a task whose job has ended: by a rank's own error, the watchdog's report, the exit code."""
        code = self._end(running)
        wait_for_watchers(running.folder / "watch", WATCHER_SECONDS)
        running.look()
        reply = running.has("outcome", task.number)
        if reply is not None and reply.outcome is not None:
            return reply.outcome
        found = _told(running.folder, task) or _reported(running.folder, task)
        if found is not None:
            return found
        text = (
            describe_exit_code(code, is_hydra=running.launch.is_hydra) or "the job ended with exit code 0 in its trial"
        )
        before, now = running.kills, running.groups.kills(running.groups.limiting()[0])
        if before is not None and now is not None and now > before:
            limit = running.groups.limiting()[1]
            return Outcome(task.name, "memory", f"the kernel killed a rank at the memory limit of {limit} bytes")
        is_signal = code > 128 or (running.launch.is_hydra and code in _FATAL)
        return Outcome(task.name, "killed" if is_signal else "error", text)


def limit_of(kind: Kind, longest_seconds: float) -> float:
    """The longest that a task may take, after a longest good trial of so many seconds; 0 for none.

    A survey says nothing of how long steps take, and steps nothing of how long it takes to look at many candidates.
    """
    if kind != "trial" or not longest_seconds:
        return FIRST_SECONDS
    return max(LEAST_SECONDS, TIMES_LONGEST * longest_seconds)


def _prepare(task: Task) -> None:
    """Make the folder of a task, with the config that the script gets."""
    if task.folder:
        folder = Path(task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_private(folder / "ds_config.json", json.dumps(dict(task.config), indent=4) + "\n")


@contextlib.contextmanager
def _logs(folder: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    with (folder / "stdout.log").open("ab") as out, (folder / "stderr.log").open("ab") as err:
        yield out, err


def _failures(folder: Path, number: int) -> list[tuple[int, Mapping[str, Any]]]:
    """Errors of single ranks in a task, the first one first."""
    found = []
    for path in folder.glob("failure-rank-*.json"):
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(path.read_text())
            if told["task"] == number:
                found.append((path.stat().st_mtime_ns, int(path.stem.rpartition("-")[2]), told))
    return [(rank, told) for _, rank, told in sorted(found, key=lambda row: row[:2])]


def _told(folder: Path, task: Task) -> Outcome | None:
    """The outcome by the error of a rank, to which others did not come."""
    failures = _failures(folder, task.number)
    if not failures:
        return None
    rank, told = failures[0]
    more = "" if len(failures) > 1 else ", while other ranks waited for it"
    return Outcome(task.name, told["status"], f"rank {rank}: {told['reason']}{more}")


_FATAL = (4, 6, 7, 8, 9, 11, 15)
"""Signals that hydra reports by their bare numbers."""

_OWN = ("error", "exit", "left", "refused", "import", "start")
_HANGS = ("hang", "late", "slow", "mismatch")
_MEMORY = ("memory", "device_memory", "memory_limit", "node_memory", "address_limit", "shared_memory")


def _reported(folder: Path, task: Task) -> Outcome | None:
    """The outcome by the watchdog's report."""
    path = folder / "report.json"
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    kind = str(report["kind"])
    first = str(report["text"]).splitlines()[0].removeprefix("mpispeed: ")
    if kind in _HANGS:
        return Outcome(task.name, "hang", first)
    kind = kind.removeprefix("death: ")
    status: Status = "memory" if kind in _MEMORY else "error" if kind in _OWN else "killed"
    return Outcome(task.name, status, str(report.get("reason") or first))


def _cancel(step: str) -> None:
    """Kill a step of SLURM, whose ranks may be on other nodes."""
    if step:
        with contextlib.suppress(OSError):
            run_command(["scancel", "--signal=KILL", step], seconds=10.0)


def _tail(path: Path, lines: int = 5) -> str:
    with contextlib.suppress(OSError):
        found = path.read_text(errors="replace").splitlines()[-lines:]
        return "".join(f"\n  {line}" for line in found)
    return ""
