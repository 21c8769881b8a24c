"""The job that follows an interrupted run, submitted through SLURM's commands."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpispeed.base.commands import run_command
from mpispeed.walltime.job_end import END, job_name
from mpispeed.walltime.job_states import is_running, words_of

SCRIPT = "MPISPEED_JOB_SCRIPT"
"""The batch script to submit again; without it the one that SLURM has kept."""

LINK = "MPISPEED_CHAIN_LINK"
"""Number of jobs before this one in its chain; passed on to the next."""

ANSWER_SECONDS, SUBMIT_SECONDS = 10.0, 25.0
"""Most time for a question, and for sbatch."""

MOST_SECONDS = 45.0
"""Most time for everything together: the job is about to end."""

ATTEMPTS, PAUSE_SECONDS = 3, 3.0

_KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
_OF_THIS_JOB = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI|PMI2|PMIX|PRTE|HYDRA|HYDI|MPIEXEC|OMPI(?!_MCA)|MPI)_|"
    r"OMPI_MCA_(orte|prte|ess|plm|pmix|ras|state|grpcomm|schizo|initial_wdir|shmem_RUNTIME)|"  # mpirun's own
    r"(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL)$"
)
_FLAGS = {
    "JobName": "--job-name", "Partition": "--partition", "Account": "--account", "QOS": "--qos",
    "Reservation": "--reservation", "TimeLimit": "--time", "NumNodes": "--nodes", "NumTasks": "--ntasks",
    "WorkDir": "--chdir", "Features": "--constraint", "MinMemoryNode": "--mem", "MinMemoryCPU": "--mem-per-cpu",
    "CPUs/Task": "--cpus-per-task", "NtasksPerN:B:S:C": "--ntasks-per-node",
}  # fmt: skip
"""Options that may have been given on the command line and not in the script."""

_UNASKED = {"MinMemoryNode": ("0",), "CPUs/Task": ("1", "N/A"), "NtasksPerN:B:S:C": ("0",)}
_TRES = {"TresPerNode": "--gres", "TresPerJob": "--gpus", "TresPerTask": "--gpus-per-task"}


class ChainError(Exception):
    """No job could be submitted; the message says what to do by hand."""


class NoAnswer(ChainError):
    """A command gave no answer, so it may have taken effect or not."""


def describe_job(job: str, until: float = math.inf) -> dict[str, str]:
    """Return SLURM's fields of a job; empty if it does not answer before `until` (monotonic)."""
    try:
        text = _call(["scontrol", "--oneliner", "show", "job", job], until=until)
    except ChainError:
        return {}
    return read_job(text)


def read_job(text: str) -> dict[str, str]:
    """The fields of a line of `scontrol show job`; a value reaches to the next name."""
    found = dict(re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)", text.strip()))
    command = re.search(r"\sCommand=(.*?)\s+(?:SubmitLine|WorkDir)=", text)  # arguments may look like fields
    if command:
        found["Command"] = command[1]
    return {name: value for name, value in found.items() if value not in ("(null)", "None", "")}


def ends_by_itself(facts: Mapping[str, str]) -> bool:
    """True if a job that was told to stop is not being cancelled or requeued, so that another one may follow it.

    A user who cancels a job wants no other one. A job that SLURM requeues goes on under its own number.
    """
    state = facts.get("JobState", "RUNNING")
    is_ended_by_slurm = not words_of(state).isdisjoint({"TIMEOUT", "PREEMPTED"}) or facts.get("Reason") == "TimeLimit"
    return is_running(state) or is_ended_by_slurm


def is_waiting(job: str, until: float = math.inf) -> bool:
    """True if a job that was submitted has not begun yet."""
    return bool(job) and "PENDING" in words_of(describe_job(job, until).get("JobState", ""))


def is_same(job: str, submitted: str) -> bool:
    """True if a job is the one that sbatch has named; a task of an array has its number after that name."""
    return bool(submitted) and (job == submitted or job.startswith(f"{submitted}_"))


@dataclass(frozen=True, slots=True)
class Chain:
    """Submits the next job of a chain."""

    environ: Mapping[str, str]
    folder: Path
    known_link: int = 0  # from the job before, since not all sites pass the environment on

    @property
    def job(self) -> str:
        """This job's name; "" outside of SLURM."""
        return job_name(self.environ)

    @property
    def link(self) -> int:
        """Number of jobs of the chain before this one, or of requeues of this one."""
        counts = (self.environ.get(name, "0") for name in (LINK, "SLURM_RESTART_COUNT"))
        return max(self.known_link, *(int(count) if count.isdigit() else 0 for count in counts))

    def submit(self, facts: Mapping[str, str], until: float = math.inf) -> str:
        """Submit the job that goes on when this one has ended; returns its number.

        Again only after a refusal: where sbatch did not answer, the job may be there all the same, and is looked for.

        Args:
            facts: what SLURM knows of this job.
            until: no command is waited for longer (monotonic).

        Raises:
            ChainError: there is no script, or sbatch refuses or does not answer.
        """
        words = self.command(facts, until)
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return _call(words, self.environment(), until=until, seconds=SUBMIT_SECONDS).strip().split(";")[0]
            except NoAnswer as error:
                found = self._find_follower(facts.get("JobName", ""), until)
                if found:
                    return found
                msg = f"{error}; if squeue shows no job that waits for this one, submit it by hand: {shlex.join(words)}"
                raise ChainError(msg) from None
            except ChainError as error:
                if not attempts_left or time.monotonic() > until:
                    msg = f"{error}; submit it by hand: {shlex.join(words)}"
                    raise ChainError(msg) from None
            time.sleep(PAUSE_SECONDS)
        raise AssertionError

    def _find_follower(self, name: str, until: float) -> str:
        """The job of this user that waits for the end of this one and has its name; "" if none comes up in time."""
        mine = re.compile(rf"afterany:(?:\d+:)*{re.escape(self.job)}(?![0-9_])")
        words = ["squeue", "--me", "--noheader", "--states=PENDING", "--format=%F|%E|%j"]
        while True:
            with contextlib.suppress(ChainError):
                for line in _call(words, until=until).splitlines():
                    number, needs, called = line.strip().split("|", 2)
                    if mine.search(needs) and (called == name or not name):
                        return number
            if time.monotonic() + PAUSE_SECONDS >= until:
                return ""
            time.sleep(PAUSE_SECONDS)

    def by_hand(self, facts: Mapping[str, str], until: float = math.inf) -> str:
        """The command to continue by hand, or the reason why there is none."""
        try:
            return shlex.join(self.command(facts, until))
        except (ChainError, OSError) as error:
            return f"sbatch with the script of this job ({error})"

    def command(self, facts: Mapping[str, str], until: float = math.inf) -> list[str]:
        """The call of sbatch.

        Raises:
            ChainError: there is no script.
        """
        flags = list(_flags(facts))
        task = self.environ.get("SLURM_ARRAY_TASK_ID")
        if task:
            flags.append(f"--array={task}")
        for name, flag in (("StdOut", "--output"), ("StdErr", "--error")):
            if name in facts:
                flags.append(f"{flag}={self._with_pattern(facts[name])}")
        own = f"--dependency=afterany:{self.job}", "--open-mode=append"
        arguments = _arguments(facts.get("Command", ""))
        return ["sbatch", "--parsable", *own, *flags, str(self.script(until)), *arguments]

    def _with_pattern(self, path: str) -> str:
        """A path of output for any job: without the number of this one."""
        folder, slash, name = path.rpartition("/")
        pattern = "%A_%a" if "_" in self.job else "%j"
        return f"{folder}{slash}{re.sub(rf'(?<![0-9]){re.escape(self.job)}(?![0-9])', pattern, name)}"

    def script(self, until: float = math.inf) -> Path:
        """The batch script of this job.

        Raises:
            ChainError: it is nowhere.
        """
        named = self.environ.get(SCRIPT, "")
        if named:
            if Path(named).is_file():
                return Path(named)
            msg = f"{SCRIPT}={named!r} is no file; let it name the batch script"
            raise ChainError(msg)
        file = self.folder / f"job-{self.job}.sbatch"
        self.folder.mkdir(parents=True, exist_ok=True)
        text = _call(["scontrol", "write", "batch_script", self.environ.get("SLURM_JOB_ID", ""), "-"], until=until)
        if not text.startswith("#!"):
            msg = f"SLURM has no batch script of job {self.job}; export {SCRIPT} with the path of one"
            raise ChainError(msg)
        file.write_text(text)
        return file

    def environment(self) -> dict[str, str]:
        """This job's environment without what SLURM, MPI and mpispeed have put there for it."""
        kept = {k: v for k, v in self.environ.items() if k in _KEPT or not _OF_THIS_JOB.match(k)}
        kept.pop(END, None)
        return {**kept, LINK: str(self.link + 1)}


def _flags(facts: Mapping[str, str]) -> Iterator[str]:
    """This job's options, as flags of sbatch."""
    for name, flag in _FLAGS.items():
        value = facts.get(name, "").split(":")[0] if name == "NtasksPerN:B:S:C" else facts.get(name, "")
        if value and value not in _UNASKED.get(name, ()):
            yield f"{flag}={value}"
    for name, flag in _TRES.items():
        kinds = [re.sub(r"^gres[:/]", "", kind).replace("=", ":") for kind in facts.get(name, "").split(",")]
        if flag != "--gres":
            kinds = [kind.removeprefix("gpu:") for kind in kinds if kind.startswith("gpu:")]
        if any(kinds):
            yield f"{flag}={','.join(kinds)}"


def _arguments(command: str) -> list[str]:
    """Arguments of a batch script. SLURM joins them and the script's path, which may have spaces itself, by spaces."""
    words = command.split()
    counts = range(1, len(words) + 1)
    return words[next((count for count in counts if Path(" ".join(words[:count])).is_file()), 1) :]


def _call(
    words: list[str], environ: Mapping[str, str] | None = None, *, until: float, seconds: float = ANSWER_SECONDS
) -> str:
    """Return the output of a SLURM command.

    Raises:
        NoAnswer: it does not answer in time.
        ChainError: it is not there, fails, or there is no time left for it.
    """
    seconds = min(seconds, until - time.monotonic())
    if seconds <= 0:
        msg = f"{words[0]} was not called, since SLURM's other commands took too long"
        raise ChainError(msg)
    try:
        done = run_command(words, seconds=seconds, environ=environ)
    except TimeoutError as late:
        raise NoAnswer(str(late)) from None
    except OSError as error:
        msg = f"{words[0]} cannot be started here ({os.strerror(error.errno or 0)}), in a container perhaps"
        raise ChainError(msg) from None
    if done.returncode:
        msg = f"{words[0]} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        raise NoAnswer(msg) if "timed out" in done.stderr else ChainError(msg)
    return done.stdout
