"""Meaning of SLURM's names for states of jobs.

SLURM keeps a state and flags, and shows the first flag that is set instead of the state: a job that runs is SIGNALING
while a signal is on its way to its nodes, and one that has just ended may be so for a moment, too. Newer releases show
both, with a comma between.
"""

from __future__ import annotations

_FINAL = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
})  # fmt: skip
_RUNNING = frozenset({"RESIZING", "RUNNING", "SIGNALING", "STOPPED", "SUSPENDED"})


def is_over(state: str) -> bool:
    """True if nothing will change any more; false for a name that is not known."""
    return words_of(state) <= _FINAL


def is_running(state: str) -> bool:
    """True if the job has processes and is not being ended."""
    return words_of(state) <= _RUNNING


def words_of(state: str) -> set[str]:
    """The state and the flags that are shown."""
    return set(state.split(","))
