"""A barrier with a time-out whose error names the ranks that have not come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CommError
from mpispeed.base.units import format_ranks
from mpispeed.mesh.collectives.group import Call
from mpispeed.mesh.collectives.transport import ROLL_CALL_TAG, Poll
from mpispeed.mesh.collectives.work import nap_until

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

VERDICT_SECONDS = 10.0
"""Longest way of the verdict from rank 0, beyond its own time-out."""

_UNDER_WAY: list[tuple[Poll, torch.Tensor]] = []
"""Messages of roll calls that have failed, from and to ranks that may still come. The next one of the same group counts
on their order, so they stay posted."""


def monitored_barrier(comm: Comm, timeout_seconds: float) -> None:
    """Return when all ranks have called.

    Rank 0 tells the others that it has come, waits for a message from each, and tells all who was there; a rank that
    comes later hears the same. Where rank 0 itself is late, the others name it.

    Collective over: `comm`.

    Raises:
        CommError: ranks, which it names, did not come within `timeout_seconds`; on every rank but a late rank 0.
    """
    if comm.size == 1:
        return
    _UNDER_WAY[:] = [(poll, x) for poll, x in _UNDER_WAY if not poll()]
    with Call(comm.group, "barrier", 0):
        has_come = (_ask if comm.rank == 0 else _answer)(comm, timeout_seconds)
    missing = [comm.ranks[i] for i, came in enumerate(has_come.tolist()) if not came]
    if missing:
        msg = (
            f"monitored_barrier over {comm}: {format_ranks(missing)} had not come within {timeout_seconds:g} s; "
            "look there for an end, a hang, or a computation that takes longer"
        )
        raise CommError(msg)


def _ask(comm: Comm, timeout_seconds: float) -> torch.Tensor:
    """Who has come, asked by rank 0. Shapes: [size]."""
    others, transport = range(1, comm.size), comm.started.group.transport
    here, marks = torch.ones(1, dtype=torch.uint8), torch.zeros(comm.size, 1, dtype=torch.uint8)
    greetings = [(transport.post_send(here, rank, ROLL_CALL_TAG), here) for rank in others]
    late = {rank: transport.post_recv(marks[rank], rank, ROLL_CALL_TAG) for rank in others}

    def all_came() -> bool:
        for rank in [rank for rank, poll in late.items() if poll()]:
            del late[rank]
        return not late

    nap_until(all_came, timeout_seconds)
    has_come = torch.ones(comm.size, dtype=torch.uint8)
    has_come[list(late)] = 0
    verdicts = [(transport.post_send(has_come, rank, ROLL_CALL_TAG), has_come) for rank in others]
    _UNDER_WAY.extend((poll, marks) for poll in late.values())
    _UNDER_WAY.extend(_open([*greetings, *verdicts], 0.0 if late else VERDICT_SECONDS))
    return has_come


def _answer(comm: Comm, timeout_seconds: float) -> torch.Tensor:
    """Who has come, as rank 0 says. Shapes: [size]."""
    transport, here, greeting = (
        comm.started.group.transport,
        torch.ones(1, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.uint8),
    )
    has_come = torch.zeros(comm.size, dtype=torch.uint8)
    sent = transport.post_send(here, 0, ROLL_CALL_TAG), here
    messages = [
        (transport.post_recv(greeting, 0, ROLL_CALL_TAG), greeting),
        (transport.post_recv(has_come, 0, ROLL_CALL_TAG), has_come),
    ]
    # Rank 0 may come as late as its greeting is waited for, and takes as long again to its verdict.
    for (poll, _), seconds in zip(messages, (timeout_seconds, timeout_seconds + VERDICT_SECONDS), strict=True):
        if not nap_until(poll, seconds):
            _UNDER_WAY.extend(_open([sent, *messages], 0.0))
            found = torch.ones(comm.size, dtype=torch.uint8)
            found[0] = 0
            return found
    _UNDER_WAY.extend(_open([sent], VERDICT_SECONDS))
    return has_come


def _open(messages: list[tuple[Poll, torch.Tensor]], limit_seconds: float) -> list[tuple[Poll, torch.Tensor]]:
    """Those that are still under way after so long."""
    end = time.monotonic() + limit_seconds
    return [(poll, x) for poll, x in messages if not nap_until(poll, end - time.monotonic())]
