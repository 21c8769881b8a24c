"""Clocks of ranks: how far each is behind that of the first rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from mpispeed.mesh.comm import Comm

ROUNDS = 16
"""Questions to the first rank; the one that was answered fastest counts."""


class Offset(NamedTuple):
    """Seconds to add to this rank's clock to have that of the first rank; the error is at most `error` seconds."""

    seconds: float
    error: float


def clock_name() -> str:
    """A text that is the same for processes that read one clock: of one running kernel, and one time namespace."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return f"process {os.uname().nodename} {os.getpid()}"


def measure_offset(
    comm: Comm, now: Callable[[], float] = time.perf_counter, name: Callable[[], str] = clock_name
) -> Offset:
    """Compare this rank's clock with that of the first rank.

    Ranks of one clock need no message. For each other clock one rank asks the first rank for its time; the answer was
    given between question and answer, so the middle is wrong by at most half of what passed meanwhile (Cristian,
    Probabilistic clock synchronization, 1989).

    Args:
        comm: the ranks.
        now: the clock, in seconds.
        name: is equal on ranks that have one clock.

    Collective over: the group.
    """
    names = comm.gather_objects(name())
    askers = {name: names.index(name) for name in names}
    found = Offset(0.0, 0.0)
    for asker in sorted(set(askers.values()) - {0}):
        if comm.rank == asker:
            found = min((_ask(comm, now) for _ in range(ROUNDS)), key=lambda offset: offset.error)
        elif comm.rank == 0:
            for _ in range(ROUNDS):
                _answer(comm, asker, now)
    offsets = comm.gather_objects(tuple(found))
    return Offset(*offsets[askers[names[comm.rank]]])


def _ask(comm: Comm, now: Callable[[], float]) -> Offset:
    message = torch.zeros(1, dtype=torch.float64)
    begin = now()
    comm.send(message, 0)
    comm.recv(message, 0)
    end = now()
    return Offset(float(message) - (begin + end) / 2, (end - begin) / 2)


def _answer(comm: Comm, asker: int, now: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    comm.recv(message, asker)
    message[0] = now()
    comm.send(message, asker)
