"""The buffers between swap files and memory: a fixed number, first come, first served."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import aligned
from mpispeed.store.cell import trouble

if TYPE_CHECKING:
    import torch

    from mpispeed.native.block_io import Transfer
    from mpispeed.store.cell import SwapLoan

STUCK_SECONDS = 120.0
"""After this time without a free buffer, and with nothing under way, a wait for one is given up."""


class Pool:
    """At most `count` buffers of `buffer_bytes`, made when they are first needed.

    A loan that finds none free waits in a queue; whoever gives a buffer back, or looks whether its own loan is ready,
    hands it to the first in the queue. Used by the main thread and by progress threads.
    """

    def __init__(self, buffer_bytes: int, count: int, *, name: str, pin: bool = False) -> None:
        """Args: `name` is the setting that limits it, for messages."""
        self.buffer_bytes, self.count, self._name, self._pin = buffer_bytes, count, name, pin
        self.made = 0
        self._free: list[torch.Tensor] = []
        self._queue: deque[SwapLoan] = deque()
        self._under_way: list[tuple[Transfer, torch.Tensor]] = []
        self._error: StoreError | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def owned_bytes(self) -> int:
        """Bytes of the buffers that were made."""
        return self.made * self.buffer_bytes

    def ask(self, loan: SwapLoan) -> None:
        """Give `loan` a buffer, now or in its turn.

        Raises:
            StoreError: it does not fit into one.
        """
        if loan.bytes > self.buffer_bytes:
            msg = f"{loan.bytes} bytes do not fit into a swap buffer of {self.buffer_bytes}; raise {self._name}"
            raise StoreError(msg)
        with self._lock:
            self._queue.append(loan)
            self.reap()

    def free(self, buffer: torch.Tensor, after: Transfer | None = None) -> None:
        """Take a buffer back, once `after` has ended."""
        with self._lock:
            if after is not None and not after.is_done():
                self._under_way.append((after, buffer))
            else:
                self._free.append(buffer)
            self.reap()

    def write(self, transfer: Transfer, buffer: torch.Tensor) -> None:
        """Take a buffer back that is being written."""
        with self._lock:
            self._under_way.append((transfer, buffer))
            self.reap()

    def withdraw(self, loan: SwapLoan) -> None:
        """`loan` does not want a buffer any more."""
        with self._lock:
            if loan in self._queue:
                self._queue.remove(loan)

    def reap(self) -> None:
        """Hand out what has become free. Not blocking."""
        with self._lock:
            under_way = []
            for transfer, buffer in self._under_way:
                if transfer.is_done():
                    self._note(transfer)
                    self._free.append(buffer)
                else:
                    under_way.append((transfer, buffer))
            self._under_way = under_way
            has_served = False
            while self._queue and (self._free or self.made < self.count):
                has_served = True
                try:
                    buffer = self._free.pop() if self._free else self._make()
                except MemoryError as error:
                    self._queue.popleft().refuse(error)
                else:
                    self._queue.popleft().take(buffer)
            if has_served:
                self._changed.notify_all()

    def _make(self) -> torch.Tensor:
        try:
            buffer = aligned(self.buffer_bytes, pin=self._pin)
        except MemoryError as error:
            msg = f"no memory for a swap buffer of {self.buffer_bytes} bytes: {error}; lower {self._name}"
            raise MemoryError(msg) from error
        self.made += 1
        return buffer

    def _note(self, transfer: Transfer) -> None:
        try:
            transfer.wait()
        except OSError as error:
            if transfer.is_write and self._error is None:
                self._error = trouble(error, is_write=True)

    def wait_for(self, loan: SwapLoan) -> None:
        """Wait until `loan` has its buffer.

        Raises:
            StoreError: none was given back for a long time.
        """
        end = time.monotonic() + STUCK_SECONDS
        while True:
            with self._lock:
                self.reap()
                if loan.is_served:
                    return
                oldest = self._under_way[0][0] if self._under_way else None
                if oldest is None:
                    self._changed.wait(0.05)
            if oldest is not None:
                _finish(oldest)
                end = time.monotonic() + STUCK_SECONDS
            elif time.monotonic() > end:
                msg = (
                    f"all {self.count} swap buffers are in use and none came back within {STUCK_SECONDS:.0f} s; "
                    f"raise {self._name}"
                )
                raise StoreError(msg)

    def settle(self) -> None:
        """Wait for everything under way.

        Raises:
            StoreError: something could not be written since the last call.
        """
        while True:
            with self._lock:
                self.reap()
                oldest = self._under_way[0][0] if self._under_way else None
                if oldest is None:
                    error, self._error = self._error, None
                    break
            _finish(oldest)
        if error is not None:
            raise error


def _finish(transfer: Transfer) -> None:
    """Wait until it has ended, well or badly: `reap` looks at how."""
    try:
        transfer.wait()
    except OSError:
        return
