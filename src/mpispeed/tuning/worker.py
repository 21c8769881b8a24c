"""A rank of the worker job: runs the script once for each task, and puts the process back as it was.

python -P -m mpi4py -m mpispeed.tuning.worker [--torch-env] FOLDER -- SCRIPT [ARGUMENTS]
python -P -m mpi4py -m mpispeed.tuning.worker [--torch-env] FOLDER -- -m MODULE [ARGUMENTS]
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.traces import own_trace
from mpispeed.compat import comm_groups
from mpispeed.config import added
from mpispeed.config.overlay import laid_over
from mpispeed.engine import features, ownership
from mpispeed.engine.distributed import join_world
from mpispeed.launch.bind import bind_rank
from mpispeed.launch.rank import join_before_failing, run_script, show_error
from mpispeed.launch.torch_env import TORCH_ENV, set_torch_variables
from mpispeed.logs import rank_logs
from mpispeed.tuning import forecast
from mpispeed.tuning.process_state import ProcessState, noted_exits
from mpispeed.tuning.protocol import OBSERVERS, REPLIES, TASKS, Lines, Outcome, Reply, Status, Task, append, pause
from mpispeed.tuning.trial import Measurement, Surveying, TrialOver
from mpispeed.tuning.words import with_config
from mpispeed.watchdog.exits import of_words

if TYPE_CHECKING:
    from mpispeed.mesh.world import World

FAILURE = "failure-rank-{}.json"
"""A rank's own error in the job's folder, for when the other ranks do not come to where it is told."""

QUIET = (*OBSERVERS, "walltime", "autotuning")
"""Sections that are off in trials: they write into folders of the run that is tuned, or measure it themselves."""

_MEMORY = ("memory", "device_memory")


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the script on this rank.

    Attributes:
        how: "over": by `TrialOver`; "left": by itself; "failed".
        status: of a failure.
        reason: of a failure, one line.
        is_alike: the failure was raised by all ranks together, and has left nothing under way.
    """

    how: str
    status: Status = "ok"
    reason: str = ""
    is_alike: bool = False


class Worker:
    """One rank that serves tasks."""

    def __init__(self, world: World, folder: Path, words: Sequence[str]) -> None:
        """Collective over: all ranks."""
        self._world, self._comm, self._folder, self._words = world, world.comm.duplicate(), folder, tuple(words)
        # Apart from the other: a rank that has failed must not answer for its trial to ranks that still measure.
        self._trial_comm = world.comm.duplicate()
        self._script_folder = script_folder(words)
        self._lines = Lines(folder / TASKS)
        self._task = Task(0, "stop")

    def serve(self) -> None:
        """Run tasks until one says stop. Collective over: all ranks."""
        comm_groups.destroy_process_group()  # a script joins for itself, and asks before
        self._reply(Reply("ready", 0, step=_slurm_step()))
        while True:
            self._task = self._comm.share(self._next() if self._comm.rank == 0 else None)
            if self._task.kind == "stop":
                return
            if not self._run(self._task):
                self._leave()
            self._reply(Reply("ready", self._task.number))

    def _next(self) -> Task:
        """Wait for a task; without the folder there is nobody to work for."""
        began = time.monotonic()
        while True:
            try:
                found = [Task(**line) for line in self._lines.new()]
            except OSError:
                return Task(0, "stop")
            if found:
                return found[0]
            pause(began)

    def _reply(self, reply: Reply) -> None:
        if self._comm.rank == 0:
            append(self._folder / REPLIES, reply)

    def _leave(self) -> NoReturn:
        """Wait to be ended with all that is still under way."""
        self._reply(Reply("leaving", self._task.number))
        while True:
            time.sleep(3600)

    # -- one task ----------------------------------------------------------------------------------------------------

    def _run(self, task: Task) -> bool:
        """Run the script and tell the outcome; False if this job cannot take another task.

        Collective over: all ranks.
        """
        state = ProcessState(self._script_folder)
        guest = self._guest(task)
        words = words_of(self._words, task)
        folder = Path(task.folder) if task.folder and self._comm.rank == 0 else None
        features.register(guest.feature)
        with noted_exits(self._script_folder) as run_exits, laid_over(laid_values(task.config)):
            with redirected(folder):
                ending = self._script(words)
                guest.close()
            outcome, goes_on = self._outcome(task, guest, self._comm.gather_objects(ending))
            self._reply(Reply("outcome", task.number, outcome))
            if not goes_on:
                return False
            with redirected(folder):
                problem = self._take_apart(run_exits)
        del guest
        problems = filter(None, self._comm.gather_objects(problem or state.restore()))
        first = next(problems, "")
        if first and self._comm.rank == 0:
            sys.stderr.write(f"mpispeed: tune: the next trial gets another job: {first}\n")
        return not first

    def _guest(self, task: Task) -> Measurement | Surveying:
        if task.kind == "trial":
            return Measurement(task, self._trial_comm, self._swallowed)
        return Surveying(task, self._trial_comm, forecast.survey)

    def _script(self, words: Sequence[str]) -> Ending:
        """Run the script to its end, whatever that is."""
        try:
            run_script(list(words))
        except TrialOver as over:
            _let_go(over)
            return Ending("over")
        except SystemExit as leaving:
            code = leaving.code
            _let_go(leaving)
            if code in (None, 0):
                return Ending("left")
            text = code if isinstance(code, str) else f"exit code {code}"
            return Ending("failed", "error", f"the script left with {text}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a script raises is told in a row
            return self._failed(error)
        return Ending("left")

    def _failed(self, error: BaseException) -> Ending:
        """The ending by an error, which is also left in the job's folder: other ranks may never come here."""
        text = "".join(traceback.format_exception(type(error), error, own_trace(error.__traceback__)))
        sys.stderr.write(text)
        cause = of_words(text)
        status: Status = "memory" if isinstance(error, MemoryError) or cause.kind in _MEMORY else "error"
        is_alike = isinstance(error, ConfigError) and error.is_collective
        reason = f"{type(error).__name__}: {_one_line(str(error))}" if str(error) else type(error).__name__
        path = self._folder / FAILURE.format(self._comm.rank)
        if not is_alike:
            with contextlib.suppress(OSError):
                path.write_text(json.dumps({"task": self._task.number, "status": status, "reason": reason}))
        _let_go(error)
        return Ending("failed", status, reason, is_alike)

    def _outcome(self, task: Task, guest: Measurement | Surveying, endings: Sequence[Ending]) -> tuple[Outcome, bool]:
        """The outcome, and False if the job has to end. Collective over: all ranks."""
        failed = [rank for rank, ending in enumerate(endings) if ending.how == "failed"]
        if failed:
            first = endings[failed[0]]
            where = "" if len(failed) == len(endings) else f"rank {failed[0]}: "
            return Outcome(task.name, first.status, where + first.reason), all(e.is_alike for e in endings)
        if isinstance(guest, Surveying):
            if guest.failure:
                return Outcome(task.name, "error", f"the survey failed: {guest.failure}"), True
            if not guest.is_over:
                return Outcome(task.name, "error", _NO_ENGINE), True
            return Outcome(task.name, "ok", survey=guest.found), True
        if not guest.is_over:
            guest.finish()
        return _measured(task, guest), True

    def _take_apart(self, run_exits: Any) -> str:
        """End what the script has left; returns what failed. Collective over: all ranks."""
        try:
            ownership.destroy_all(self._comm)
            run_exits()
            comm_groups.destroy_process_group()
            if torch.distributed.is_initialized():  # of another backend
                torch.distributed.destroy_process_group()
        except Exception as error:  # a row is there already; another job goes on
            return f"what the script left could not be taken apart: {type(error).__name__}: {_one_line(str(error))}"
        return ""

    def _swallowed(self, measurement: Measurement) -> None:
        """The script has caught `TrialOver` and goes on: tell what was measured, and let the job be ended."""
        reason = "the script caught the end of its trial (an except BaseException around its steps?)"
        found = _measured(self._task, measurement)
        outcome = Outcome(found.name, found.status, found.reason or reason, found.metrics)
        self._reply(Reply("outcome", self._task.number, outcome))
        self._leave()


_NO_ENGINE = "the script ended without a call of mpispeed.initialize (deepspeed.initialize) that trains"


def _measured(task: Task, guest: Measurement) -> Outcome:
    made = len(guest.own.steps)
    if not guest.has_engine:
        return Outcome(task.name, "error", _NO_ENGINE)
    if not guest.metrics:
        return Outcome(
            task.name, "error", f"the script ended after {made} global steps, and the measurement begins with step "
            f"{task.first_step}; let it run longer, or lower autotuning.start_profile_step",
        )  # fmt: skip
    if guest.mismatch:
        return Outcome(task.name, "error", guest.mismatch, guest.metrics)
    reason = "" if made >= task.last_step else f"the script ended after {made} of {task.last_step} global steps"
    return Outcome(task.name, "ok", reason, guest.metrics)


def words_of(words: Sequence[str], task: Task) -> list[str]:
    """The script's words for a task: its arguments, with the file of the task's config in place of another.

    The file is that of `task.folder`; without a folder, and without such a word, the settings come by themselves.
    """
    count = 2 if words[0] == "-m" else 1
    own = words[count:] if task.arguments is None else task.arguments
    if task.folder:
        own = with_config(own, Path(task.folder) / "ds_config.json")
    return [*words[:count], *own]


def laid_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a trial that win over those of the script: its config, and nothing that writes or measures."""
    known = added.root().model_fields
    off = {name: {**config.get(name, {}), "enabled": False} for name in QUIET if name in known}
    return {**config, **off}


def script_folder(words: Sequence[str]) -> Path | None:
    """The folder of the script, or of the top package of its module; None if it is not known."""
    if words[0] != "-m":
        return Path(words[0]).resolve().parent
    try:
        found = importlib.util.find_spec(words[1].partition(".")[0])
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    return Path(found.origin).resolve().parent


@contextmanager
def redirected(folder: Path | None) -> Iterator[None]:
    """Context in which this process, with its libraries, writes to stdout.log and stderr.log of a folder."""
    if folder is None:
        yield
        return
    _flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        for number, name in ((1, "stdout.log"), (2, "stderr.log")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(file, number)
            os.close(file)
        yield
    finally:
        _flush()
        for number, before in enumerate(kept, 1):
            os.dup2(before, number)
            os.close(before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]


def _let_go(error: BaseException) -> None:
    """Let go of the frames of a script, which hold its engine and its model."""
    seen = set[int]()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if found.__traceback__ is not None:
            with contextlib.suppress(RuntimeError):
                traceback.clear_frames(found.__traceback__)
        found.__traceback__, found = None, found.__context__
    error.__context__ = error.__cause__ = None
    gc.collect()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _slurm_step() -> str:
    job, step = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return f"{job}.{step}" if job and step.isdigit() else ""


def main() -> None:
    """Entry point."""
    sys.excepthook = show_error
    rank_logs.begin()
    words = sys.argv[1:]
    try:
        bind_rank()
        if words[0] == TORCH_ENV:
            words = words[1:]
            set_torch_variables()
        world = join_world()
    except Exception:
        join_before_failing()
        raise
    Worker(world, Path(words[0]), words[words.index("--") + 1 :]).serve()


if __name__ == "__main__":
    main()
