"""Hand-off of a run to the outside, by rank 0: the file `state.json`, and the job that continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mpispeed.walltime import requeue, run_state
from mpispeed.walltime.job_states import is_running
from mpispeed.walltime.requests import Asked, TouchFiles
from mpispeed.walltime.run_state import INTERRUPTED, RUNNING, STOPPED, RunState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Reason for a run's end, and the step it has reached."""

    asked: Asked
    reason: str
    tag: str
    step: int
    save_seconds: float
    signal_name: str = ""


class Leaving:
    """The record of one run. Only rank 0 has one."""

    def __init__(self, environ: Mapping[str, str], folder: Path, *, follows: str, most_links: int) -> None:
        """Args: `follows` is "dependency", "requeue" or "none"; `most_links` jobs may follow the first."""
        self._folder, self._follows, self._most_links = folder, follows, most_links
        self._chain = requeue.Chain(environ, folder)
        self._state = RunState(RUNNING, job=self._chain.job)

    @property
    def state(self) -> str:
        """The state in the file now."""
        return self._state.state

    def find_rival(self) -> str:
        """Return the reason why this job must not begin, another one that is running this run; "" if there is none."""
        before = run_state.read(self._folder)
        if before is None or before.state != RUNNING or before.job in ("", self._chain.job):
            return ""
        until = time.monotonic() + requeue.MOST_SECONDS
        if not is_running(requeue.describe_job(before.job, until).get("JobState", "")):
            return ""
        return (
            f"job {before.job} is writing this run, says {self._folder / run_state.NAME}, and SLURM says that it is "
            "running: wait for it or cancel it, or name another walltime.save_dir and --run-dir"
        )

    def begin(self, save_dir: Path, step: int, tag: str) -> float:
        """Mark the run as running; return the seconds a save took in the job before, 0 if unknown."""
        before = run_state.read(self._folder)
        known, waiting = 0.0, ""
        if before is not None:
            known, job = before.save_seconds, self._chain.job
            is_next = requeue.is_same(job, before.next_job)
            waiting = "" if is_next else before.next_job
            if is_next or (job and job == before.job):
                self._chain = replace(self._chain, known_link=before.link + is_next)
        self._state = replace(
            self._state, save_dir=str(save_dir), step=step, first_step=step, tag=tag, save_seconds=known,
            next_job=waiting, link=self._chain.link,
        )  # fmt: skip
        self.mark(RUNNING, step, "")
        return known

    def mark(self, state: str, step: int, reason: str) -> None:
        """Write the file; a failure is only logged, because the run itself is well."""
        self._state = replace(self._state, state=state, step=step, reason=reason, time=run_state.now_text())
        try:
            self._state.write(self._folder)
        except OSError as error:
            log.warning("walltime   %s could not be written: %s", self._folder / run_state.NAME, error)

    def leave(self, ending: Ending) -> None:
        """Record the end of a saved run, and arrange for the job that continues."""
        until = time.monotonic() + requeue.MOST_SECONDS
        is_signal, job = ending.asked is Asked.SIGNAL, self._chain.job
        why_not, facts = self._why_not(ending), {}
        has_follower = bool(job) and self._follows == "dependency"
        if not why_not and job and (is_signal or has_follower):
            facts = requeue.describe_job(job, until)
            if is_signal and not requeue.ends_by_itself(facts):
                why_not = f"{ending.signal_name} came because the job is cancelled or requeued"
        self._state = replace(self._state, tag=ending.tag, save_seconds=ending.save_seconds)
        saved = f"saved as {ending.tag}" if ending.tag else "nothing is saved"
        log.info("walltime   the run ends at step %d, %s: %s", ending.step, saved, ending.reason)
        if why_not:
            self.mark(STOPPED, ending.step, f"{ending.reason}; {why_not}")
            log.info("walltime   no job follows by itself: %s", why_not)
            return
        # One that was cancelled since would be waited for in vain.
        waiting = self._state.next_job if requeue.is_waiting(self._state.next_job, until) else ""
        self._state = replace(self._state, next_job=waiting)
        self.mark(INTERRUPTED, ending.step, ending.reason)
        if not has_follower:
            return
        if waiting:
            log.info("walltime   job %s waits already to go on from here", waiting)
        elif is_signal and not facts:
            log.warning(
                "walltime   SLURM does not say whether this job is cancelled, so no job is submitted; to go on: %s",
                self._chain.by_hand(facts, until),
            )
        else:
            self._submit(ending, facts, until)

    def _why_not(self, ending: Ending) -> str:
        """The reason why the run does not continue by itself; "" if it does."""
        first, chained = self._state.first_step, self._chain
        if ending.asked is Asked.STOP:
            return f"remove {self._folder / TouchFiles.NAMES[Asked.STOP]} and start it again to go on"
        if self._follows == "none":
            return 'walltime.chain is "none"'
        if ending.step <= first:
            return f"this job made no step (it began at step {first}), and another one would not either"
        if chained.link >= self._most_links:
            return f"{chained.link} jobs came before this one, and walltime.max_chain is {self._most_links}"
        return ""

    def _submit(self, ending: Ending, facts: Mapping[str, str], until: float) -> None:
        try:
            job = self._chain.submit(facts, until)
        except (requeue.ChainError, OSError) as error:
            log.warning("walltime   no job could be submitted to go on from here: %s", error)
            return
        log.info("walltime   job %s was submitted and goes on when this one has ended", job)
        self._state = replace(self._state, next_job=job)
        self.mark(INTERRUPTED, ending.step, ending.reason)
