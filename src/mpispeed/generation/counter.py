"""The shared counter: numbers of batches, handed out in order by rank 0 to whoever asks, and the news of a stop.

A request is REQUEST_WORDS int64 and carries the report of the batch before; the answer is one number. Rank 0 answers
through the progress thread of a channel of its own, so what its main thread does delays nobody. News of a stop come
to all ranks unasked, as a message that they look for between tokens. One-sided operations of MPI were no choice: where
the network cannot carry them out by itself they wait for the owner to enter the library.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
import torch

from mpispeed.mesh import World
from mpispeed.mesh.collectives.transport import Poll, Transport
from mpispeed.mesh.collectives.work import Work, nap_until

REQUEST_WORDS, NEWS_WORDS = 7, 4
REQUEST_TAG, ANSWER_TAG, NEWS_TAG = 1, 2, 3

NONE = -1
"""In place of a number: there is no further batch."""

OWNER_NAP_SECONDS = 5e-3
"""Longest nap of the thread that answers: what a request waits in vain, at worst. A waking costs some 50 us."""

SWITCH_SECONDS = 0.5e-3
"""Python's interval of switching threads on rank 0. Each call of MPI gives the interpreter away, and a main thread that
is busy in Python keeps it so long: at the usual 5 ms an answer took 60 ms."""

LAST_NAP_SECONDS = 20e-3
"""Longest nap of a rank that has nothing left to do but to wait for the others."""


class Op(IntEnum):
    """Kind of a request."""

    NEXT = 0
    STOP = 1
    BYE = 2


@dataclass(frozen=True, slots=True)
class Report:
    """The facts that a rank tells of a batch that it has answered.

    Attributes:
        number: of the batch; NONE: there was no batch before.
        prompts: that it had.
        tokens: that were generated.
        microseconds: that it took.
        waited_microseconds: that this rank had waited for its number.
    """

    number: int = NONE
    prompts: int = 0
    tokens: int = 0
    microseconds: int = 0
    waited_microseconds: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """News that no further batch begins.

    Attributes:
        asked: who asked, a value of `walltime.requests.Asked`; 0: there is no stop.
        milliseconds: for the batches that are running; those that take longer are dropped.
        signal: number of the signal, 0 if it was none.
        rank: that got the signal.
    """

    asked: int = 0
    milliseconds: int = 0
    signal: int = 0
    rank: int = 0


GOES_ON = Stop()


def _words(*numbers: int) -> torch.Tensor:
    """By numpy: torch's default device may be a GPU."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _room(count: int) -> torch.Tensor:
    return torch.from_numpy(np.zeros(count, dtype=np.int64))


class Owner:
    """The numbers, on rank 0; `poll` answers the other ranks and is true when it has nothing more to do."""

    def __init__(self, transport: Transport, count: int, note: Callable[[int, Report], None]) -> None:
        """Args: `note` is called with the rank and its report, on the thread that polls or asks."""
        self._transport, self._count, self._note = transport, count, note
        self._next = 0
        self._lock = threading.Lock()
        self._others = range(1, transport.size)
        self._here = set(range(transport.size))
        self._all_left, self._is_closing = threading.Event(), False
        self._told = self._stop = GOES_ON
        self._has_told_end = False
        self._sent: list[tuple[Poll, torch.Tensor]] = []
        self._request = _room(REQUEST_WORDS)
        self._source = transport.post_recv_any(self._request, REQUEST_TAG) if self._others else None

    @property
    def stop(self) -> Stop:
        """The stop that was asked for first."""
        return self._stop

    def next_number(self) -> int:
        """The next number; NONE if there is none, or if the ranks are to stop."""
        with self._lock:
            if self._stop.asked or self._next == self._count:
                return NONE
            self._next += 1
            return self._next - 1

    def request_stop(self, stop: Stop) -> None:
        """Hand out nothing more, and tell all ranks; the first stop counts."""
        with self._lock:
            if not self._stop.asked:
                self._stop = stop

    def take(self, rank: int, op: Op, report: Report) -> int:
        """Carry a request out; the number for the answer."""
        if report.number != NONE:
            self._note(rank, report)
        if op is Op.NEXT:
            return self.next_number()
        self._here.discard(rank)
        if not self._here:
            self._all_left.set()
        return NONE

    def have_all_left(self) -> bool:
        """True once every rank has said that it asks for nothing more."""
        return self._all_left.is_set()

    def close(self) -> None:
        """Let the other ranks go."""
        self._is_closing = True

    def poll(self) -> bool:
        """Answer what has come. Only one thread at a time."""
        while self._source is not None and (rank := self._source()) is not None:
            op, *facts = self._request.tolist()
            if op == Op.STOP:
                self.request_stop(Stop(*facts[: len(astuple(GOES_ON))]))
            else:
                number = self.take(rank, Op(op), Report(*facts[: len(astuple(Report()))]))
                if op == Op.NEXT:
                    self._send(rank, ANSWER_TAG, number)
            awaits = bool(self._here - {0})
            self._source = self._transport.post_recv_any(self._request, REQUEST_TAG) if awaits else None
        if self._stop != self._told:
            self._told = self._stop
            self._tell_all(self._stop)
        if self._is_closing and not self._has_told_end:
            self._has_told_end = True
            self._tell_all(GOES_ON)
        self._sent = [(is_sent, kept) for is_sent, kept in self._sent if not is_sent()]
        return self._has_told_end and not self._sent

    def _tell_all(self, stop: Stop) -> None:
        for rank in self._others:
            self._send(rank, NEWS_TAG, *astuple(stop))

    def _send(self, rank: int, tag: int, *numbers: int) -> None:
        message = _words(*numbers)
        self._sent.append((self._transport.post_send(message, rank, tag), message))


class Counter:
    """The counter as a rank sees it: `ask` for a number while a batch runs, `take` it when that has ended.

    Attributes:
        waited_seconds: that the last `take` waited.
    """

    def __init__(
        self, world: World, count: int, note: Callable[[int, Report], None], *, is_threaded: bool | None = None
    ) -> None:
        """Args: `count` numbers, used by rank 0 only, as is `note`; without a thread rank 0 answers in `heed`.

        Collective over: all ranks.
        """
        self.waited_seconds = 0.0
        self._switch_seconds = sys.getswitchinterval()
        self._comm = world.comm.duplicate()
        self._transport, self._rank = self._comm.transport, world.rank
        self._owner = Owner(self._transport, count, note) if world.rank == 0 else None
        self._serving: Work | None = None
        channel = world.new_channel("counter")
        if self._owner is not None and world.size > 1 and (world.has_threads if is_threaded is None else is_threaded):
            channel.longest_nap_seconds = OWNER_NAP_SECONDS
            sys.setswitchinterval(SWITCH_SECONDS)
            self._serving = channel.watch(self._owner.poll, "counter")
        self._is_own_server = self._owner is not None and self._serving is None and world.size > 1
        self._answer, self._number, self._arrival = _room(1), NONE, _always
        self._sent: list[tuple[Poll, torch.Tensor]] = []
        self._stop, self._has_asked_stop, self._is_over = GOES_ON, False, False
        self._news = _room(NEWS_WORDS)
        self._news_arrival = _never if self._owner else self._transport.post_recv(self._news, 0, NEWS_TAG)

    def ask(self, report: Report) -> None:
        """Ask for the next number, and tell of the last batch; not blocking. `take` comes before the next `ask`."""
        if self._owner is not None:
            self._number, self._arrival = self._owner.take(0, Op.NEXT, report), _always
            return
        self._arrival = self._transport.post_recv(self._answer, 0, ANSWER_TAG)
        self._send(Op.NEXT, *astuple(report))

    def take(self) -> int:
        """The number that was asked for, once it is there; NONE if there is none, or if the ranks are to stop."""
        began = time.perf_counter()
        nap_until(self._has_arrived)
        self.waited_seconds = time.perf_counter() - began
        number = self._number if self._owner is not None else int(self._answer[0])
        return NONE if self.heed().asked else number

    def heed(self) -> Stop:
        """The stop that was asked for, if this rank has heard of one; to be called now and then while a batch runs."""
        if self._owner is not None:
            if self._is_own_server:
                self._owner.poll()
            return self._owner.stop
        while not self._is_over and self._news_arrival():
            stop = Stop(*self._news.tolist())
            self._is_over = not stop.asked
            if stop.asked:
                self._stop = stop
                self._news_arrival = self._transport.post_recv(self._news, 0, NEWS_TAG)
        self._sent = [(is_sent, kept) for is_sent, kept in self._sent if not is_sent()]
        return self._stop

    def request_stop(self, stop: Stop) -> None:
        """Let all ranks stop; not blocking, and once."""
        if self._owner is not None:
            self._owner.request_stop(stop)
        elif not self._has_asked_stop:
            self._has_asked_stop = True
            self._send(Op.STOP, *astuple(stop))

    def leave(self, report: Report) -> None:
        """Say that this rank asks for nothing more; on rank 0, wait for the others to say so."""
        if self._owner is None:
            self._send(Op.BYE, *astuple(report))
            return
        self._owner.take(0, Op.BYE, report)
        nap_until(self._have_all_left, longest_seconds=LAST_NAP_SECONDS)

    def close(self) -> None:
        """Wait for rank 0, which has done what remains after `leave`. Collective over: all ranks."""
        if self._owner is not None:
            self._owner.close()
            if self._serving is not None:
                self._serving.wait()
                sys.setswitchinterval(self._switch_seconds)
            else:
                nap_until(self._owner.poll)
        else:
            nap_until(self._has_ended, longest_seconds=LAST_NAP_SECONDS)
        self._comm.close()

    def _has_arrived(self) -> bool:
        self.heed()
        return self._arrival()

    def _have_all_left(self) -> bool:
        self.heed()
        return self._owner is None or self._owner.have_all_left()

    def _has_ended(self) -> bool:
        self.heed()
        return self._is_over

    def _send(self, op: Op, *numbers: int) -> None:
        padded = [op, *numbers, *[0] * (REQUEST_WORDS - 1 - len(numbers))]
        message = _words(*padded)
        self._sent.append((self._transport.post_send(message, 0, REQUEST_TAG), message))


def _always() -> bool:
    return True


def _never() -> bool:
    return False
