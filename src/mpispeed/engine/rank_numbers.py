"""Times and memory of each rank, told to all ranks after the gradient norm."""

from __future__ import annotations

import math
import os
import resource
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from mpispeed.base.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Counters
    from mpispeed.mesh.collectives.group import CommTrace

NAMES = (
    "Ranks/step_seconds", "Ranks/update_seconds", "Ranks/communication_seconds", "Ranks/resident_bytes",
    "Ranks/device_bytes",
)  # fmt: skip
"""Series of each rank. Seconds are means of the steps since the row before: of a step, of its part from the sums of
gradients to the new parameters, and of the time that its threads spent in verbs of communication."""

MANY_RANKS = 64
"""With more, rows come so much less often that there are not more of them in the same number of steps."""


class SentNumbers(Protocol):
    """Numbers of each rank that follow the norm of gradients."""

    def is_wanted(self) -> bool:
        """True if this rank has numbers that others want; they are given if any rank has some. Local."""

    def give(self) -> Sequence[float]:
        """This rank's numbers of a step, none if they are not due. Local: all ranks decide alike."""

    def take(self, table: torch.Tensor) -> None:
        """Get those of all ranks, if there are any. Shapes: [ranks, numbers]."""


class RankNumbers:
    """The numbers of this rank, given when they are due; the table of all ranks goes to `take`.

    Due are the second step, for what the first one cost, and then one in so many steps; each has the numbers of the
    steps before.
    """

    def __init__(self, counters: Counters, trace: CommTrace, every: int, take: Callable[[torch.Tensor], None]) -> None:
        """Args: `every` how many steps a row comes; `take` gets [ranks, NAMES], NaN for what is unknown."""
        self._counters, self._trace, self._every = counters, trace, every
        self._take = take
        self._steps, self._seconds, self._update_seconds = 0, 0.0, 0.0
        self._communication_seconds = self._all_communication()
        self._memory = ResidentMemory()

    def is_wanted(self) -> bool:
        """Always."""
        return True

    def take(self, table: torch.Tensor) -> None:
        """As `SentNumbers.take`."""
        self._take(table)

    def attach(self, bus: Bus) -> None:
        """Listen to the steps of this rank."""
        bus.subscribe(Event.STEP_END, self._on_step)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._steps += 1
        self._seconds += event["seconds"]
        self._update_seconds += event["update_seconds"]

    def give(self) -> Sequence[float]:
        """This rank's numbers, if they are due. Local: all ranks decide alike."""
        done = self._counters.global_steps
        if done == 0 or (done != 1 and done % self._every):
            return ()
        steps = self._steps or math.nan  # after a load there are none
        seconds, update_seconds = self._seconds / steps, self._update_seconds / steps
        spent = self._all_communication()
        communication = (spent - self._communication_seconds) / steps
        self._steps, self._seconds, self._update_seconds, self._communication_seconds = 0, 0.0, 0.0, spent
        return seconds, update_seconds, communication, self._memory.nbytes(), device_bytes()

    def _all_communication(self) -> float:
        return sum(entry.seconds for entry in self._trace.entries().values())


def hand_out(numbers: Sequence[SentNumbers], given: Sequence[Sequence[float]], table: torch.Tensor) -> None:
    """Let each of `numbers` take its columns, as many as it has given. Shapes: [ranks, numbers of all]."""
    end = 0
    for each, mine in zip(numbers, given, strict=True):
        start, end = end, end + len(mine)
        if mine:
            each.take(table[:, start:end])


def period(every: int, ranks: int) -> int:
    """Steps between rows of `ranks` ranks."""
    return every * max(1, -(-ranks // MANY_RANKS))


class ResidentMemory:
    """Memory of this process; the file is opened once, which takes longer than to read it."""

    def __init__(self) -> None:
        try:
            self._handle = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self._handle = -1
        else:
            weakref.finalize(self, os.close, self._handle).atexit = False

    def nbytes(self) -> float:
        """Bytes now; NaN where the system does not tell."""
        try:
            return float(int(os.pread(self._handle, 200, 0).split()[1]) * resource.getpagesize())
        except (OSError, ValueError, IndexError):
            return math.nan


def device_bytes() -> float:
    """Memory of tensors on this process's device; NaN without one."""
    return float(torch.cuda.memory_allocated()) if torch.cuda.is_initialized() else math.nan
