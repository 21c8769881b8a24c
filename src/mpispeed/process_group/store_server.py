"""Messages of a key-value store over one group, and the thread of rank 0 that answers them.

A request is a header of HEADER_WORDS int64 (op, slot, parts, bytes of the body, number) and, if it has parts, a body:
the length of each part as int64, then the parts. The answer is ANSWER_WORDS int64 (status, parts, bytes of the body)
and a body alike. A slot is a call of a rank under way; it has tags of its own, so that calls of several threads do not
wait for each other.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.transport import Poll
from mpispeed.mesh.collectives.work import SHORTEST_NAP_SECONDS, nap_until
from mpispeed.mesh.comm import Comm
from mpispeed.process_group.store_table import MOST_PARTS, TABLE_BYTES, Op, Request, Status, Table

log = logging.getLogger(__name__)

HEADER_WORDS, ANSWER_WORDS = 5, 3

SLOTS = 4096
"""Most calls of one rank under way at once."""

HEADER_TAG, BODY_TAG, ANSWER_TAG = 1, 2 + SLOTS, 2 + 2 * SLOTS
"""Tags of headers, and of bodies and answers of slot 0; those of the other slots follow."""

MESSAGE_BYTES = TABLE_BYTES + 8 * MOST_PARTS
"""Longest body."""

LONGEST_NAP_SECONDS = 100e-3
"""Longest nap of the thread and of a call that waits; each waking costs some 50 us of a core."""

NAP_SHARE = 1 / 20
"""How long a nap is in proportion to the time in which nothing has come: what it adds to that time, at worst."""

LAST_SECONDS = 1.0
"""How long a thread that is told to end waits for its own message."""


def nap_seconds(quiet_seconds: float) -> float:
    """How long to sleep when nothing has come for this time."""
    return min(max(SHORTEST_NAP_SECONDS, quiet_seconds * NAP_SHARE), LONGEST_NAP_SECONDS)


def words(*numbers: int) -> torch.Tensor:
    """A header. By numpy, as all tensors here: torch's default device may be a GPU."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def empty_words(count: int) -> torch.Tensor:
    """Room for a header."""
    return torch.from_numpy(np.zeros(count, dtype=np.int64))


def empty_body(count_bytes: int) -> torch.Tensor:
    """Room for a body."""
    return torch.from_numpy(np.empty(count_bytes, dtype=np.uint8))


def pack(parts: Sequence[bytes]) -> torch.Tensor:
    """A body of these parts; empty without any."""
    content = bytearray(array("q", map(len, parts)).tobytes() + b"".join(parts))
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8)) if content else empty_body(0)


def unpack(body: torch.Tensor, count: int) -> list[bytes]:
    """The parts of a body.

    Raises:
        CommError: the lengths do not add up.
    """
    content = body.numpy().tobytes()
    lengths = array("q", content[: 8 * count])
    if any(length < 0 for length in lengths) or 8 * count + sum(lengths) != len(content):
        msg = f"a message of the store of {len(content)} bytes has {count} parts whose lengths do not add up"
        raise CommError(msg)
    ends = np.cumsum([8 * count, *lengths]).tolist()
    return [content[begin:end] for begin, end in pairwise(ends)]


def flaw(header: Sequence[int]) -> str:
    """The reason why a header is no one's that this module sends; empty if there is none."""
    op, slot, count, count_bytes, number = header
    if op not in set(Op):
        return f"op {op} is unknown"
    if not 0 <= slot < SLOTS:
        return f"slot {slot} is not in 0..{SLOTS - 1}"
    if not 0 <= count <= MOST_PARTS:
        return f"{count} parts are not in 0..{MOST_PARTS}"
    if not 8 * count <= count_bytes <= MESSAGE_BYTES or (count == 0 and count_bytes):
        return f"{count_bytes} bytes do not fit {count} parts and the limit of {MESSAGE_BYTES}"
    if op in (Op.GET, Op.WAIT) and number < 0:
        return f"a time of {number} ms is none"
    return ""


class Server:
    """The thread of rank 0. It ends when all other ranks have sent BYE, or when told to."""

    def __init__(self, comm: Comm, table: Table) -> None:
        self._comm, self._table = comm, table
        self._here = set(range(comm.size)) - {comm.rank}
        self._header = empty_words(HEADER_WORDS)
        self._source = comm.transport.post_recv_any(self._header, HEADER_TAG)
        self._has_source = True
        self._bodies: list[tuple[Poll, int, list[int], torch.Tensor]] = []
        self._answers: deque[tuple[int, int, Status, Sequence[bytes]]] = deque()
        self._sent: list[tuple[Poll, torch.Tensor]] = []
        self._wake, self._must_end = threading.Event(), False
        self._farewell: object = None  # what MPI may still read when the thread has ended
        self._thread = threading.Thread(target=self._run, name="mpispeed-store", daemon=True)
        self._thread.start()

    @property
    def absent(self) -> list[int]:
        """The ranks that have not sent BYE."""
        return sorted(self._here)

    def wake(self) -> None:
        """End a nap of the thread: the table has answers for it."""
        self._wake.set()

    def join(self, limit_seconds: float) -> bool:
        """Wait until all ranks have left; False if they do not within the limit."""
        self._thread.join(limit_seconds)
        return not self._thread.is_alive() and not self._here

    def end(self) -> None:
        """End the thread though ranks have not left; a message of its own takes the receive that it has posted."""
        if not self._thread.is_alive():
            return
        header = words(Op.BYE, 0, 0, 0, 0)
        self._farewell = (self._comm.transport.post_send(header, self._comm.rank, HEADER_TAG), header)
        self._must_end = True
        self.wake()
        self._thread.join(2 * LAST_SECONDS)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            # Raised from a thread it would end the job, also one that is closing; who needs the store will say so.
            log.warning("the store of rank %d serves no more: %s", self._comm.ranks[self._comm.rank], error)
            self._table.drop(f"the store serves no more: {error}")

    def _serve(self) -> None:
        moved_at = time.monotonic()
        while self._has_source or self._bodies or self._answers or self._sent:
            if self._must_end:
                nap_until(lambda: not self._has_source or self._source() is not None, LAST_SECONDS)
                return
            has_moved = self._take_header()
            has_moved |= self._take_bodies()
            has_moved |= self._send_answers()
            self._sent = [(poll, kept) for poll, kept in self._sent if not poll()]
            now = time.monotonic()
            self._table.expire(now)
            if has_moved:
                moved_at = now
            else:
                self._wake.wait(nap_seconds(now - moved_at))
                self._wake.clear()

    def _take_header(self) -> bool:
        rank = self._source() if self._has_source else None
        if rank is None:
            return False
        header = self._header.tolist()
        reason = flaw(header)
        op, slot, count, count_bytes, _ = header
        if reason:
            text = f"a request of rank {self._comm.ranks[rank]} to the store is damaged: {reason}"
            log.warning("%s", text)
            if 0 <= slot < SLOTS:
                self._answers.append((rank, slot, Status.REFUSED, [text.encode()]))
        elif op == Op.BYE:
            self._here.discard(rank)
            self._table.drop("this rank has closed the store", rank)
            self._answers.append((rank, slot, Status.DONE, ()))
        elif count:
            body = empty_body(count_bytes)
            self._bodies.append((self._comm.transport.post_recv(body, rank, BODY_TAG + slot), rank, header, body))
        else:
            self._ask(rank, header, [])
        self._has_source = bool(self._here)
        if self._has_source:
            self._source = self._comm.transport.post_recv_any(self._header, HEADER_TAG)
        return True

    def _take_bodies(self) -> bool:
        arrived = [entry for entry in self._bodies if entry[0]()]
        self._bodies = [entry for entry in self._bodies if not any(entry is each for each in arrived)]
        for _, rank, header, body in arrived:
            try:
                self._ask(rank, header, unpack(body, header[2]))
            except CommError as error:
                self._answers.append((rank, header[1], Status.REFUSED, [str(error).encode()]))
        return bool(arrived)

    def _ask(self, rank: int, header: Sequence[int], parts: Sequence[bytes]) -> None:
        op, slot, _, _, number = header

        def done(status: Status, answer: Sequence[bytes]) -> None:
            self._answers.append((rank, slot, status, answer))
            self.wake()

        self._table.ask(Request(rank, Op(op), parts, number), done, time.monotonic())

    def _send_answers(self) -> bool:
        has_sent = False
        while self._answers:
            rank, slot, status, parts = self._answers.popleft()
            body = pack(parts)
            header = words(status, len(parts), body.numel())
            for message in (header, body)[: 2 if parts else 1]:
                self._sent.append((self._comm.transport.post_send(message, rank, ANSWER_TAG + slot), message))
            has_sent = True
        return has_sent
