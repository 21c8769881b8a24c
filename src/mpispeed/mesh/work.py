"""The handle of a started operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpispeed.base.errors import CommError
from mpispeed.mesh import ledger as ledgers

Poll = Callable[[], bool]
"""Asks without blocking whether something has happened."""


SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3


def nap_until(poll: Poll, limit_seconds: float = float("inf"), longest_seconds: float = LONGEST_NAP_SECONDS) -> bool:
    """Sleep in short naps, growing to `longest_seconds`, until `poll` says yes; False if the time ran out first."""
    end, nap = time.monotonic() + limit_seconds, SHORTEST_NAP_SECONDS
    while not poll():
        if time.monotonic() > end:
            return False
        time.sleep(nap)
        nap = min(nap * 1.5, longest_seconds)
    return True


class Work:
    """A started operation; holds on to its buffers until it is done.

    `drive`, if given, is called while waiting, for transports that have no progress thread to do it. `row` is that of
    the ledger. For tensors of a device, `join` makes what a waiting thread queues from then on come after the
    operation, and `bring` brings a message from host memory to where it is expected, once.
    """

    join: Callable[[], object] | None = None
    bring: Callable[[], object] | None = None

    def __init__(
        self, verb: str, buffers: object = None, drive: Callable[[Work], None] | None = None, row: int = ledgers.NO_ROW
    ) -> None:
        self.verb, self.row = verb, row
        self._buffers = buffers
        self._drive = drive
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._after: list[Callable[[], object]] = []

    def is_done(self) -> bool:
        """True once the operation has ended, well or badly."""
        if self._drive is not None and not self._done.is_set():
            self._drive(self)
        return self._done.is_set()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the operation is done and re-raise what failed in it.

        Raises:
            CommError: `timeout_seconds` passed first.
        """
        if not self.settle(timeout_seconds):
            msg = f"{self.verb} was not done after {timeout_seconds} s; another rank may not have started it"
            raise CommError(msg)
        if self._error is not None:
            raise self._error
        if self.bring is not None:
            bring, self.bring = self.bring, None
            bring()

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Block until the operation has ended, well or badly; False if the time ran out first."""
        has_ended = self._done.is_set() or self._await(timeout_seconds)
        if has_ended and self.join is not None:
            self.join()
        return has_ended

    def _await(self, timeout_seconds: float | None) -> bool:
        ledger = ledgers.current() if self.row != ledgers.NO_ROW else None
        if ledger is not None:
            ledger.waits_for(self.row)
        try:
            if self._drive is None:
                return self._done.wait(timeout_seconds)
            return nap_until(self.is_done, float("inf") if timeout_seconds is None else timeout_seconds)
        finally:
            if ledger is not None:
                ledger.waits_for(ledgers.NO_ROW)

    def after(self, fn: Callable[[], object]) -> None:
        """Call `fn` once when the operation has ended, well or badly, on whatever thread ends it; now if it has."""
        self._after.append(fn)
        if self._done.is_set():
            self._call_after()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done; called by whoever carries the operation out."""
        self._error, self._buffers, self._drive = error, None, None
        ledger = ledgers.current() if self.row != ledgers.NO_ROW else None
        if ledger is not None:
            ledger.end(self.row)
        try:
            self._call_after()
        finally:  # whoever waits must not hang because a callback failed
            self._done.set()
            self._call_after()  # of who asked meanwhile

    def _call_after(self) -> None:
        while True:
            try:
                fn = self._after.pop()
            except IndexError:
                return
            fn()


Wait = Callable[[Work, Callable[[], str]], None]
"""Waits for a started operation; the second argument says what for, in words."""
