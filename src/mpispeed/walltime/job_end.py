"""End of the job: by the limit that was given, by the answer of SLURM or PBS, or unknown."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mpispeed.base.commands import run_command
from mpispeed.base.units import format_duration, parse_duration
from mpispeed.walltime.pbs_job import ask_pbs, job_id

log = logging.getLogger(__name__)

LIMIT = "MPISPEED_WALLTIME"
"""Time from the start of the program to the end of the job; set by `mpispeed run --walltime`."""

END = "MPISPEED_JOB_END"
"""The end of the job in seconds since 1970, which stays right in programs that are started late or again."""

ASK_SECONDS = 300.0
"""Interval of questions to SLURM: limits can change while a job runs, and its controller serves many jobs."""

ASK_NEAR_SECONDS = 60.0
"""The interval when little time is left."""

NEAR_SECONDS = 1200.0

MOVED_SECONDS = 60.0
"""Smallest change of a limit that is reported; SLURM's answers are whole seconds."""

ANSWER_SECONDS = 10.0


def job_name(environ: Mapping[str, str]) -> str:
    """This job's name for SLURM's commands; "" outside of SLURM. A task of an array has the array's name for it."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def read_left(text: str) -> float:
    """Seconds of an answer of `squeue -o %L`; infinite where there is no limit.

    Raises:
        ValueError: the answer is no time (INVALID, NOT_SET, nothing).
    """
    answer = text.strip()
    return math.inf if answer == "UNLIMITED" else parse_duration(_with_hours(answer))


def _with_hours(answer: str) -> str:
    """Squeue leaves the hours out; a number alone would be taken for seconds, which it never writes."""
    if ":" not in answer:
        msg = f"squeue answered {answer!r}, which is no time"
        raise ValueError(msg)
    return answer


def ask_slurm(job: str) -> float:
    """Seconds that a job has left, by SLURM; infinite without a limit.

    Raises:
        OSError: there is no squeue, or it does not answer in time.
        ValueError: the answer is no time.
    """
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    done = run_command(words, seconds=ANSWER_SECONDS)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"squeue ended with {done.returncode}")
    return read_left(done.stdout)


def process_age_seconds() -> float:
    """Seconds since this process was started."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class JobEnd:
    """The end of the job on this process's own clock, so that clocks of other machines do not matter.

    A limit that was given is counted from the start of the process. SLURM, or PBS, is asked at the start, and again now
    and then by a thread: training never waits for it. The earlier end counts.
    """

    def __init__(
        self,
        limit_seconds: float | None,
        environ: Mapping[str, str],
        *,
        ask: Callable[[str], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._job = clock, job_name(environ) or job_id(environ)
        is_pbs = bool(self._job) and not job_name(environ)
        self._system = "PBS" if is_pbs else "SLURM"
        self._ask = ask or (ask_pbs if is_pbs else ask_slurm)
        now = clock()
        self._given = math.inf if limit_seconds is None else now - process_age_seconds() + limit_seconds
        self._given = min(self._given, _given_end(environ) + now)
        self._told = _exported(environ) + now
        self._can_ask = bool(self._job)
        self._wake, self._closes = threading.Event(), False
        self._thread: threading.Thread | None = None
        self.problem = ""  # why there was no answer, if there was none

    @property
    def left_seconds(self) -> float:
        """Time to the end of the job; infinite if no end is known."""
        return min(self._given, self._told) - self._clock()

    @property
    def source(self) -> str:
        """The source of the end: SLURM, PBS, the limit that was given, or nobody."""
        if math.isinf(self.left_seconds):
            return "nobody"
        return "the limit that was given" if self._given <= self._told else self._system

    def start(self) -> None:
        """Ask once, then keep asking in a thread; also if there is no answer now."""
        if not self._can_ask:
            return
        self.ask()
        if self._can_ask:
            self._thread = threading.Thread(target=self._keep_asking, name="mpispeed-job-end", daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """Ask SLURM or PBS; without an answer the known end stays."""
        try:
            left = self._ask(self._job)
        except FileNotFoundError as error:
            self._can_ask, self.problem = False, str(error)
        except (OSError, ValueError) as error:
            self.problem = str(error)
        else:
            self.problem, self._told = "", left + self._clock()

    def close(self) -> None:
        """End the thread."""
        self._closes = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(ANSWER_SECONDS + 1)

    def _keep_asking(self) -> None:
        while not self._closes:
            self._wake.wait(ASK_NEAR_SECONDS if self.left_seconds < NEAR_SECONDS else ASK_SECONDS)
            if self._closes:
                return
            before = self._told
            self.ask()
            if self._told != before and not abs(self._told - before) < MOVED_SECONDS:
                left = self._told - self._clock()
                end = "has no end any more" if math.isinf(left) else f"ends in {format_duration(max(0.0, left))} now"
                log.info("walltime   the job %s, by %s", end, self._system)


def _given_end(environ: Mapping[str, str]) -> float:
    """Seconds to the end that a batch script names; infinite without one that lies ahead."""
    text = environ.get(END, "")
    if not text:
        return math.inf
    try:
        left = float(text) - time.time()
    except ValueError:
        left = math.nan
    if left > 0:
        return left
    log.warning("%s=%r is no time that lies ahead, in seconds since 1970, and is left out", END, text)
    return math.inf


def _exported(environ: Mapping[str, str]) -> float:
    """Seconds to the end that newer versions of SLURM export; infinite without."""
    try:
        return float(environ["SLURM_JOB_END_TIME"]) - time.time()
    except (KeyError, ValueError):
        return math.inf
