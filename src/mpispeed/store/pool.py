"""Pool of buffers between swap files and memory: a fixed number, first come, first served; errors of transfers."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import aligned

if TYPE_CHECKING:
    import torch

    from mpispeed.native.block_io import Transfer


STUCK_SECONDS = 120.0
"""After this time without a free buffer, and with nothing under way, a wait for one is given up."""


class Borrower(Protocol):
    """Request for a buffer."""

    @property
    def bytes(self) -> int:
        """Bytes that it needs."""

    @property
    def is_served(self) -> bool:
        """True once it has its buffer, or was refused one."""

    def take(self, buffer: torch.Tensor) -> None:
        """Receive a buffer."""

    def refuse(self, error: MemoryError) -> None:
        """Receive an error instead of a buffer."""


class Pool:
    """At most `count` buffers of `buffer_bytes`, made when they are first needed.

    A lease that finds none free waits in a queue; a call that gives a buffer back, or polls a lease, serves the first
    in the queue. Thread-safe.
    """

    def __init__(self, buffer_bytes: int, count: int, *, name: str, pin: bool = False) -> None:
        """Args: `name` is the setting that limits the pool, for messages."""
        self.buffer_bytes, self.count, self._name, self._pin = buffer_bytes, count, name, pin
        self.made = 0
        self._free: list[torch.Tensor] = []
        self._queue: deque[Borrower] = deque()
        self._under_way: list[tuple[Transfer, torch.Tensor]] = []
        self._error: StoreError | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def owned_bytes(self) -> int:
        """Bytes of the buffers that were made."""
        return self.made * self.buffer_bytes

    def ask(self, lease: Borrower) -> None:
        """Give `lease` a buffer, now or in its turn.

        Raises:
            StoreError: it does not fit into one.
        """
        if lease.bytes > self.buffer_bytes:
            msg = f"{lease.bytes} bytes do not fit into a swap buffer of {self.buffer_bytes}; raise {self._name}"
            raise StoreError(msg)
        with self._lock:
            self._queue.append(lease)
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
        """Take a buffer back once it is written."""
        with self._lock:
            self._under_way.append((transfer, buffer))
            self.reap()

    def withdraw(self, lease: Borrower) -> None:
        """Cancel the request of `lease`."""
        with self._lock:
            if lease in self._queue:
                self._queue.remove(lease)

    def reap(self) -> None:
        """Hand out buffers that have become free. Not blocking."""
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
                self._error = transfer_error(error, is_write=True)

    def wait_for(self, lease: Borrower) -> None:
        """Wait until `lease` has its buffer.

        Raises:
            StoreError: none was given back for a long time.
        """
        end = time.monotonic() + STUCK_SECONDS
        while True:
            with self._lock:
                self.reap()
                if lease.is_served:
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
        """Wait for all transfers under way.

        Raises:
            StoreError: a write has failed since the last call.
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
    """Wait until the transfer has ended, well or badly; `reap` reads the result."""
    try:
        transfer.wait()
    except OSError:
        return


def transfer_error(error: Exception, *, is_write: bool) -> StoreError:
    """The StoreError for a transfer that failed, or could not be started."""
    verb = "written" if is_write else "read"
    return StoreError(
        f"model states could not be {verb}: {error}; training cannot go on from here: mend the disk behind nvme_path, "
        "or name another, and resume from the last checkpoint"
    )
