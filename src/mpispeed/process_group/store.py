"""Key-value store of torch.distributed over MPI, kept by rank 0: no socket, no port, no file."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from mpispeed.base.errors import CommError, ConfigError
from mpispeed.base.units import format_ranks
from mpispeed.mesh.collectives.transport import Poll
from mpispeed.mesh.comm import Comm
from mpispeed.process_group.store_server import (
    ANSWER_TAG,
    ANSWER_WORDS,
    BODY_TAG,
    HEADER_TAG,
    SLOTS,
    Server,
    empty_body,
    empty_words,
    nap_seconds,
    pack,
    unpack,
    words,
)
from mpispeed.process_group.store_table import Op, Request, Status, Table, shown

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(seconds=300)

ANSWER_SECONDS = 30.0
"""How long a call waits for rank 0 beyond its own time: that one may be in a computation that shares no thread."""

CLOSE_SECONDS = 30.0
"""How long `close` waits for the other ranks."""

EXIT_SECONDS = 1.0
"""How long a rank that leaves without `close` waits for the others; rank 0 goes on serving after it."""


class StoreTimeout(CommError, DistStoreError):
    """A key did not come in time. Also the DistStoreError that clients of torch catch."""


class MpiStore(Store):
    """A store for torch.distributed. Values are bytes; calls of several threads do not wait for each other.

    Limits are KEY_BYTES, VALUE_BYTES and TABLE_BYTES of `store_table`. What waits does so for `timeout`, which
    set_timeout() changes; as in torch, a time-out of 0 never ends. Calls raise StoreTimeout, and CommError for what is
    refused.
    """

    def __init__(
        self, comm: Comm, timeout: timedelta = DEFAULT_TIMEOUT, *, has_threads: bool = True, name: str = "store"
    ) -> None:
        """Start the store on a group of its own; `has_threads` is that of the world.

        Stores that are made at the same time need different names. Collective over: comm.

        Raises:
            ConfigError: rank 0 cannot serve, because its MPI library lets one thread communicate only.
        """
        super().__init__()
        if comm.size > 1 and not has_threads:
            msg = (
                "a store of torch.distributed over MPI needs a thread of its own on rank 0, and this MPI library runs "
                "without MPI_THREAD_MULTIPLE: use a library with it, or give torch a store of its own (TCPStore)"
            )
            raise ConfigError(msg)
        self.set_timeout(timeout)
        self._comm = comm.of_members(range(comm.size), name, ("store",)) if comm.size > 1 else comm
        self._table = Table(comm.ranks) if comm.rank == 0 else None
        self._server = Server(self._comm, self._table) if self._table is not None and comm.size > 1 else None
        self._lock = threading.Lock()
        self._free_slots = list(reversed(range(SLOTS)))
        self._under_way: dict[int, list[object]] = {}  # slot -> buffers and requests that MPI uses
        self._is_closed, self._is_exiting, self._pid = False, False, os.getpid()
        # Also what keeps this object: torch's C++ calls it by name for as long as it has references of its own.
        atexit.register(self._leave_at_exit)

    # -- what torch calls; C++ looks some up by names of its own --------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, whether or not it exists."""
        self._ask(Op.SET, [_encoded(key), _encoded(value)])

    def get(self, key: str) -> bytes:
        """The value of a key, waited for."""
        return self._ask(Op.GET, [_encoded(key)])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 where there is none, and return the sum."""
        return int(self._ask(Op.ADD, [_encoded(key)], value)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value, or none and "" is expected; return what it has then.

        Of a key that does not exist and is not set, `expected`.
        """
        return self._ask(Op.COMPARE_SET, [_encoded(key), _encoded(expected), _encoded(desired)])[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, empty where there is none."""
        self._ask(Op.APPEND, [_encoded(key), _encoded(value)])

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist."""
        return bool(self._ask(Op.CHECK, _all_encoded(keys))[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._ask(Op.WAIT, _all_encoded(keys), timeout=timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, waited for together."""
        return self._ask(Op.GET, _all_encoded(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        if len(keys) != len(values):
            msg = f"multi_set() got {len(keys)} keys and {len(values)} values: give one value for each key"
            raise CommError(msg)
        pairs = zip(_all_encoded(keys), _all_encoded(values), strict=True)
        self._ask(Op.SET, [part for pair in pairs for part in pair])

    def delete_key(self, key: str) -> bool:
        """Remove a key; False if it was not there."""
        return bool(self._ask(Op.DELETE, [_encoded(key)])[0])

    def num_keys(self) -> int:
        """Number of keys."""
        return int(self._ask(Op.COUNT, [])[0])

    def has_extended_api(self) -> bool:
        """True: append, multi_get and multi_set are there."""
        return True

    def clone(self) -> MpiStore:
        """This store: its calls do not wait for each other, so that it needs no second connection."""
        return self

    deleteKey = delete_key
    getNumKeys = num_keys

    # -- leaving -------------------------------------------------------------------------------------------------

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """End the store; its thread ends when all ranks have come, or after the limit without them.

        Collective over: the group.
        """
        if not self._is_first_to_close():
            return
        is_complete = self._leave(limit_seconds)
        if self._server is not None and not is_complete:
            absent = format_ranks(self._comm.ranks[rank] for rank in self._server.absent)
            log.warning("the store ends although %s did not close it within %g s", absent, limit_seconds)
            self._server.end()
        if is_complete and self._comm.size > 1:
            self._comm.close()

    def _is_first_to_close(self) -> bool:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        atexit.unregister(self._leave_at_exit)
        return not was_closed

    def _leave(self, limit_seconds: float) -> bool:
        """Tell rank 0, or wait for the others there; True if that answered or they came."""
        if self._table is not None:
            self._table.drop("this rank has closed the store", 0)
            return self._server is None or self._server.join(limit_seconds)
        try:
            self._ask_rank_0(Request(self._comm.rank, Op.BYE, ()), limit_seconds)
        except CommError as error:
            log.debug("rank 0 did not answer the last message to the store: %s", error)
            return False
        return True

    def _leave_at_exit(self) -> None:
        if os.getpid() != self._pid:  # a child of a fork is no rank
            return
        self._is_exiting = True
        if self._is_first_to_close():
            self._leave(EXIT_SECONDS)

    # -- asking --------------------------------------------------------------------------------------------------

    def _ask(self, op: Op, parts: Sequence[bytes], number: int = 0, timeout: timedelta | None = None) -> list[bytes]:
        given: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        limit_seconds = _seconds(given)
        if op in (Op.GET, Op.WAIT):
            number = 0 if math.isinf(limit_seconds) else math.ceil(limit_seconds * 1000)
        request = Request(self._comm.rank, op, parts, number)
        request.check()
        if self._is_closed:
            raise self._closed_error(op)
        if self._table is not None:
            status, answer = _ask_here(self._table, request)
        else:
            status, answer = self._ask_rank_0(request, limit_seconds + ANSWER_SECONDS)
        if status == Status.DONE:
            return answer
        if self._is_closed:
            raise self._closed_error(op)
        text = b" ".join(answer).decode(errors="replace")
        raise StoreTimeout(text) if status == Status.LATE else CommError(text)

    def _closed_error(self, op: Op) -> BaseException:
        if self._is_exiting and threading.current_thread() is not threading.main_thread():
            return SystemExit()  # a thread that outlives the program is no failure of the rank
        return CommError(f"{op.name} of {self._comm}: the store is closed; make another one, or close it later")

    def _ask_rank_0(self, request: Request, limit_seconds: float) -> tuple[int, list[bytes]]:
        """Send a request and wait for the answer; what is given up keeps its slot, which an answer may still come for.

        Raises:
            StoreTimeout: rank 0 did not answer.
        """
        body, answer = pack(request.parts), empty_words(ANSWER_WORDS)
        with self._lock:
            if not self._free_slots:
                msg = f"{SLOTS} calls to the store are under way on rank {self._comm.rank}, which is the limit"
                raise CommError(msg)
            slot = self._free_slots.pop()
        header = words(request.op, slot, len(request.parts), body.numel(), request.number)
        kept: list[object] = [header, body, answer]
        self._under_way[slot] = kept
        is_there = self._comm.transport.post_recv(answer, 0, ANSWER_TAG + slot)
        kept.append(is_there)
        sends = [self._comm.transport.post_send(header, 0, HEADER_TAG)]
        if request.parts:
            sends.append(self._comm.transport.post_send(body, 0, BODY_TAG + slot))
        kept.append(sends)
        self._await(is_there, request, limit_seconds)
        status, count, count_bytes = answer.tolist()
        found = empty_body(count_bytes)
        if count:
            is_filled = self._comm.transport.post_recv(found, 0, ANSWER_TAG + slot)
            kept += [found, is_filled]
            self._await(is_filled, request, limit_seconds)
        self._await(lambda: all([poll() for poll in sends]), request, limit_seconds)
        with self._lock:
            del self._under_way[slot]
            self._free_slots.append(slot)
        return status, unpack(found, count)

    def _await(self, poll: Poll, request: Request, limit_seconds: float) -> None:
        began, quiet_seconds = time.monotonic(), 0.0
        while not poll():
            if quiet_seconds > limit_seconds:
                ranks = self._comm.ranks
                msg = (
                    f"{request.op.name} of rank {ranks[self._comm.rank]} for {shown(request.keys) or 'the store'}: "
                    f"rank {ranks[0]}, which keeps the store, did not answer within {limit_seconds:g} s; it has left, "
                    "or holds Python's lock in a long computation"
                )
                raise StoreTimeout(msg)
            time.sleep(nap_seconds(quiet_seconds))
            quiet_seconds = time.monotonic() - began


def _ask_here(table: Table, request: Request) -> tuple[int, list[bytes]]:
    found: list[tuple[int, list[bytes]]] = []
    has_ended = threading.Event()

    def done(status: Status, answer: Sequence[bytes]) -> None:
        found.append((status, list(answer)))
        has_ended.set()

    table.ask(request, done, time.monotonic())
    end = time.monotonic() + (request.number / 1000 if request.number else float("inf"))
    while not has_ended.wait(min(1.0, max(0.0, end - time.monotonic()))):
        table.expire(time.monotonic())  # the thread does so as well, if there is one and it serves
    return found[0]


def _encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _all_encoded(texts: Sequence[str] | Sequence[str | bytes]) -> list[bytes]:
    return [_encoded(text) for text in texts]


def _seconds(timeout: timedelta) -> float:
    """Seconds of a time-out, a millisecond at least; infinite for 0."""
    return max(1e-3, timeout.total_seconds()) if timeout else float("inf")
