"""The words of a job of generation: found work, progress now and then, a summary."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from mpispeed.base.units import format_count, format_duration
from mpispeed.generation.counter import Report

log = logging.getLogger(__name__)


@dataclass
class Tally:
    """The numbers that rank 0 has of the batches of this start; reports may come from any thread.

    Attributes:
        batches: of the job.
        prompts: that are to be answered, in all batches.
        found_batches: that earlier starts had finished.
        found_prompts: in those.
    """

    batches: int
    prompts: int
    found_batches: int
    found_prompts: int
    done_batches: int = 0
    done_prompts: int = 0
    tokens: int = 0
    longest_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    waiting_rank: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, rank: int, report: Report) -> None:
        """Take the report of one batch, from the first rank of a group."""
        with self._lock:
            self.done_batches += 1
            self.done_prompts += report.prompts
            self.tokens += report.tokens
            self.by_rank[rank] = self.by_rank.get(rank, 0) + 1
            self.longest_seconds = max(self.longest_seconds, report.microseconds / 1e6)
            if report.waited_microseconds / 1e6 > self.longest_wait_seconds:
                self.longest_wait_seconds, self.waiting_rank = report.waited_microseconds / 1e6, rank

    @property
    def finished(self) -> int:
        """Batches that are finished."""
        return self.found_batches + self.done_batches

    def progress(self) -> str:
        """One line: batches done, tokens per second, time left."""
        with self._lock:
            seconds = max(1e-9, time.monotonic() - self.began)
            prompts = self.found_prompts + self.done_prompts
            left = "time left unknown"
            if self.done_prompts:
                # An upper bound for jobs whose long batches come first.
                left = f"{format_duration((self.prompts - prompts) * seconds / self.done_prompts)} left"
            return (
                f"{self.finished} of {self.batches} batches, {prompts} of {self.prompts} prompts, "
                f"{format_count(self.tokens / seconds)} tokens/s, {left}"
            )

    def summary(self) -> str:
        """What this start has done."""
        with self._lock:
            seconds = time.monotonic() - self.began
            groups = len(self.by_rank)
            shares = f"{min(self.by_rank.values())} to {max(self.by_rank.values())} batches each" if groups else ""
            waits = ""
            if self.longest_wait_seconds:
                waits = (
                    f"; longest wait for a batch {self.longest_wait_seconds * 1e3:.1f} ms (rank {self.waiting_rank})"
                )
            return (
                f"{self.done_batches} batches, {self.done_prompts} prompts, {self.tokens} tokens in "
                f"{format_duration(seconds)} ({self.tokens / max(seconds, 1e-9):.1f} tokens/s) by {groups} groups"
                f"{' of ' + shares if shares else ''}{waits}"
            )
