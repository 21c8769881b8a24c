"""The handle of a started operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.trace import recorder as recorders

Poll = Callable[[], bool]
"""Asks without blocking whether something has happened."""


SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3


def nap_until(poll: Poll, limit_seconds: float = float("inf"), longest_seconds: float = LONGEST_NAP_SECONDS) -> bool:
    """Sleep in short naps, growing to `longest_seconds`, until `poll` is true; False if the time ran out first."""
    end, nap = time.monotonic() + limit_seconds, SHORTEST_NAP_SECONDS
    while not poll():
        if time.monotonic() > end:
            return False
        time.sleep(nap)
        nap = min(nap * 1.5, longest_seconds)
    return True


def in_this_mode(fn: Callable[[], object]) -> Callable[[], object]:
    """`fn`, to be called later as if now: only in inference mode may anything write to tensors that were made there."""
    if not torch.is_inference_mode_enabled():
        return fn

    def call() -> object:
        with torch.inference_mode():
            return fn()

    return call


class Posted(NamedTuple):
    """A message under way: its polls, the buffers it needs until then, and the final copy to its destination."""

    polls: list[Poll]
    kept: object
    bring: Callable[[], object] | None = None


class Work:
    """A started operation; holds on to its buffers until it is done.

    `drive`, if given, is called while waiting, for transports without a progress thread. `row` is that of the recorder.
    For tensors of a device, `join` makes later work of the waiting thread come after the operation, and `bring` copies
    a message from host memory to its destination, once.
    """

    join: Callable[[], object] | None = None
    bring: Callable[[], object] | None = None

    def __init__(
        self,
        verb: str,
        buffers: object = None,
        drive: Callable[[Work], None] | None = None,
        row: int = recorders.NO_ROW,
    ) -> None:
        self.verb, self.row = verb, row
        self._buffers = buffers
        self._drive = drive
        self._done = threading.Event()
        self._lock = threading.Lock()  # of `_after`, until `_done` is set
        self._error: BaseException | None = None
        self._after: list[Callable[[], object]] = []

    def is_done(self) -> bool:
        """True once the operation has ended, well or badly."""
        if self._drive is not None and not self._done.is_set():
            self._drive(self)
        return self._done.is_set()

    is_completed = is_done  # as torch calls it

    @property
    def buffers(self) -> object:
        """What the operation uses until it is done."""
        return self._buffers

    @property
    def error(self) -> BaseException | None:
        """What an operation that has ended badly raises from `wait`."""
        return self._error

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until the operation is done; raise its error, if any.

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
        recorder = recorders.current() if self.row != recorders.NO_ROW else None
        if recorder is not None:
            recorder.waits_for(self.row)
        try:
            if self._drive is None:
                return self._done.wait(timeout_seconds)
            return nap_until(self.is_done, float("inf") if timeout_seconds is None else timeout_seconds)
        finally:
            if recorder is not None:
                recorder.waits_for(recorders.NO_ROW)

    def after(self, fn: Callable[[], object]) -> None:
        """Call `fn` once when the operation has ended, well or badly, on the thread that ends it; now if it has.

        Whoever waits does so for `fn` too, unless the operation has ended before.
        """
        with self._lock:
            if not self._done.is_set():
                self._after.append(fn)
                return
        fn()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done; called by the thread that carries the operation out."""
        self._error, self._buffers, self._drive = error, None, None
        recorder = recorders.current() if self.row != recorders.NO_ROW else None
        if recorder is not None:
            recorder.end(self.row)
        failures: list[BaseException] = []
        while (fn := self._next_after()) is not None:
            try:
                fn()
            except BaseException as failure:  # whoever waits must not hang because a callback failed
                failures.append(failure)
        if failures:
            raise failures[0]

    def _next_after(self) -> Callable[[], object] | None:
        """What is to be called next, in the order in which it was given; where nothing is left, this is done."""
        with self._lock:
            if self._after:
                return self._after.pop(0)
            self._done.set()
            return None


Wait = Callable[[Work, Callable[[], str]], None]
"""Waits for a started operation; the second argument says what for, in words."""
