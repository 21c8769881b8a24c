"""Ends of a job of generation before its prompts do: walltime, a signal, the file STOP; and the hand-off."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.units import format_duration
from mpispeed.generation.counter import Counter, Stop
from mpispeed.walltime import run_state
from mpispeed.walltime.handoff import Ending, Leaving
from mpispeed.walltime.job_end import LIMIT, JobEnd
from mpispeed.walltime.last_safe_step import choose_limit
from mpispeed.walltime.requests import Asked, SignalWatch, TouchFiles
from mpispeed.walltime.run_state import FAILED, FINISHED

if TYPE_CHECKING:
    from mpispeed.generation.report import Tally

log = logging.getLogger(__name__)

SIGNALS = ("USR1", "TERM")
MOST_LINKS = 100
"""Most jobs that follow one another."""

LOOK_SECONDS = 0.25

SIGNAL_SECONDS = {signal.SIGTERM: 10.0, signal.SIGUSR1: 60.0}
"""For batches that run when a signal comes. SLURM kills what it has cancelled 30 s after SIGTERM; SIGUSR1 is what batch
scripts ask for some time before the limit."""

FILE_SECONDS = 24 * 3600.0
"""For batches that run when the file STOP is found: nobody is in a hurry."""

SLACK = 1.25
"""Factor over the time of the longest batch: the next one may take longer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The way in which a job ends.

    Attributes:
        follows: "dependency", "requeue" or "none", as `walltime.chain`.
        margin_seconds: that are to be left when everything is written.
        interval_seconds: between lines of progress.
    """

    follows: str = "dependency"
    margin_seconds: float = 30.0
    interval_seconds: float = 30.0


class Heed:
    """Questions of every rank between tokens: has a signal come, is there a stop, must this batch be dropped?"""

    def __init__(self, counter: Counter, rank: int, signals: SignalWatch) -> None:
        self._counter, self._rank, self._signals = counter, rank, signals
        self._drops_at = math.inf
        self._has_heard = False

    def must_drop(self) -> bool:
        """True once the running batch has to be given up."""
        if self._signals.number and not self._has_heard:
            milliseconds = int(SIGNAL_SECONDS[signal.Signals(self._signals.number)] * 1000)
            self._counter.request_stop(Stop(int(Asked.SIGNAL), milliseconds, self._signals.number, self._rank))
        stop = self._counter.heed()
        if stop.asked and not self._has_heard:
            self._has_heard = True
            self._signals.take()
            self._drops_at = time.monotonic() + stop.milliseconds / 1000
        return time.monotonic() >= self._drops_at


class Steward:
    """The thread of rank 0 that watches time and files, and writes lines of progress."""

    def __init__(self, counter: Counter, tally: Tally, plan: Plan, job_end: JobEnd, folder: Path) -> None:
        self._counter, self._tally, self._plan, self._job_end = counter, tally, plan, job_end
        self._files = TouchFiles(folder)
        self._wake, self._closes = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="mpispeed-steward", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closes = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        said = time.monotonic()
        while not self._closes:
            self._look()
            if time.monotonic() - said >= self._plan.interval_seconds:
                said = time.monotonic()
                log.info("generate   %s", self._tally.progress())
            self._wake.wait(LOOK_SECONDS)

    def _look(self) -> None:
        if self._counter.heed().asked:
            return
        if self._files.look() is Asked.STOP:
            self._counter.request_stop(Stop(int(Asked.STOP), int(FILE_SECONDS * 1000)))
            return
        left = self._job_end.left_seconds
        # Before the first batch has ended, its age is all that is known.
        longest = self._tally.longest_seconds or time.monotonic() - self._tally.began
        needed = self._plan.margin_seconds + SLACK * longest
        if left < needed:
            log.info(
                "walltime   %s left, %s needed for another batch", format_duration(max(0.0, left)),
                format_duration(needed),
            )  # fmt: skip
            seconds = max(0.0, left - self._plan.margin_seconds / 2)
            self._counter.request_stop(Stop(int(Asked.JOB_END), int(seconds * 1000)))


class Shift:
    """One start of a job, as the batch system sees it: `state.json`, and the job that goes on. Rank 0 only."""

    def __init__(self, plan: Plan, work: Path) -> None:
        self.folder = run_state.run_folder(os.environ, work)
        self._work, self._plan = work, plan
        self._leaving = Leaving(os.environ, self.folder, follows=plan.follows, most_links=MOST_LINKS)
        self._finished = 0
        self.job_end = JobEnd(choose_limit(None, os.environ.get(LIMIT)), os.environ)

    def find_rival(self) -> str:
        """The reason why this job must not begin; "" if there is none."""
        return self._leaving.find_rival()

    def is_stopped(self) -> bool:
        """True if a file STOP is left from before."""
        return TouchFiles(self.folder).look() is Asked.STOP

    def begin(self, finished: int) -> None:
        """Mark the run as running."""
        self._finished = finished
        self._leaving.begin(self._work, finished, self._work.name if finished else "")
        self.job_end.start()
        left = self.job_end.left_seconds
        if not math.isinf(left):
            log.info("walltime   the job ends in %s, by %s", format_duration(max(0.0, left)), self.job_end.source)

    def end(self, finished: int, stop: Stop) -> None:
        """Mark the run as finished, or as interrupted, and arrange for the job that goes on."""
        self.job_end.close()
        self._finished = finished
        if not stop.asked:
            self._leaving.mark(FINISHED, finished, "all prompts are answered")
            return
        asked, name = Asked(stop.asked), SignalWatch.name_of(stop.signal)
        reason = {
            Asked.JOB_END: "the job ends",
            Asked.SIGNAL: f"{name} on rank {stop.rank}",
            Asked.STOP: "the file STOP",
        }[asked]
        self._leaving.leave(Ending(asked, reason, self._work.name, finished, 0.0, name))

    def fail(self, error: BaseException) -> None:
        """Mark the run as failed."""
        self._leaving.mark(FAILED, self._finished, f"{type(error).__name__}: {error}")
