"""Reusable scratch buffers."""

from __future__ import annotations

import threading
from typing import Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError
from mpispeed.store import host_memory

_Shelf = tuple[torch.dtype, int, bool, bool]
"""Buffers alike: dtype, elements, whether in host memory, whether page-locked."""

LEAST_RETURNED_BYTES = 4 << 20
"""From this size on pageable host memory goes back to the system when others need the room."""

REST_PART = 2
"""Of what was in use at once at most this part is kept at `Arena.rest`."""


class Arena:
    """Flat scratch tensors by dtype and size.

    Long ones in host memory are mapped for themselves. A step needs many lengths, and few of them at a time: what is
    given back is kept as long as all together is no more than was in use at once; before it would be, those go to the
    system that were given back first. Keeping all would make a process grow to the sum of all lengths; keeping none
    costs new pages at every use, which are slower than the copies into them. Short ones, page-locked ones, which are
    slow to make, and those of a device, where work may be queued, are all kept.

    Gathered parameters come and go beside torch's own temporaries, which are largest when backward needs no
    parameters any more: with `rests` one longest buffer more is kept in between, and little from `rest` on.

    Buffers are given back by the progress thread as well as by the caller, hence the lock. On a device, the stream of
    the taker waits for work that the last user queued. On meta all buffers are there.

    Attributes:
        owned_bytes: buffers in use, and those that are kept.
        peak_bytes: the most of these so far.
        rests: whether the user calls `rest`.
    """

    def __init__(self, device: torch.device | str = "cpu", *, returns: bool = True) -> None:
        """Args: `returns`: False keeps long buffers too."""
        self.device, self._returns, self.rests = torch.device(device), returns, False
        self._free: dict[_Shelf, list[torch.Tensor]] = {}
        self._last: dict[int, Any] = {}  # id of a free buffer -> event behind its last use
        self._taken: dict[int, _Shelf] = {}  # by id of a buffer
        self._spare: dict[int, _Shelf] = {}  # by id of a long buffer that is free, the one given back first before
        self._lock = threading.Lock()
        self.owned_bytes = self.peak_bytes = 0
        self._used_bytes = self._most_used_bytes = self._spare_bytes = self._longest_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, *, on_host: bool = False, pin: bool = False) -> torch.Tensor:
        """A flat tensor of `numel` elements with unspecified content, in host memory if asked for.

        `pin`: in host memory it is page-locked, where this process computes on a device.

        Raises:
            MemoryError: there is no host memory for it.
        """
        with self._lock:
            home = devices.HOST if on_host and self.device.type != "meta" else self.device
            is_host = home.type in ("cpu", "meta")
            key = dtype, numel, is_host, pin and home.type == "cpu"
            shelf = self._free.get(key)
            if shelf:
                buffer = shelf.pop()
                self._use(buffer.nbytes)
                if self._spare.pop(id(buffer), None) is not None:
                    self._spare_bytes -= buffer.nbytes
                event = self._last.pop(id(buffer), None)
                if event is not None:
                    devices.follow(self.device, event)
            else:
                self._make_room(numel * dtype.itemsize)
                with torch.inference_mode(False):  # it may be taken for training later
                    buffer = self._make(key, home)
                self._use(buffer.nbytes)
                self.owned_bytes += buffer.nbytes
                self.peak_bytes = max(self.peak_bytes, self.owned_bytes)
            self._taken[id(buffer)] = key
            return buffer

    def _use(self, count: int) -> None:
        self._used_bytes += count
        self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
        self._longest_bytes = max(self._longest_bytes, count)

    def _make_room(self, count: int) -> None:
        """Let long buffers go that nobody uses, until `count` bytes more are no more than were in use at once.

        Where the buffers of a step differ much, as those of an embedding and a block, the longest would have to go for
        every two short ones, and would be made again in the same step.
        """
        most = max(self._most_used_bytes, self._used_bytes + count) + (self._longest_bytes if self.rests else 0)
        while self._spare and self.owned_bytes + count > most:
            self._let_go()

    def rest(self) -> None:
        """Let long buffers go that nobody uses, those given back first before, down to half of the most in use."""
        with self._lock:
            while self._spare and self._spare_bytes > self._most_used_bytes // REST_PART:
                self._let_go()

    def _let_go(self) -> None:
        """Give the long buffer that was given back first to the system."""
        first = next(iter(self._spare))
        shelf = self._free[self._spare.pop(first)]
        size = shelf.pop(next(i for i, each in enumerate(shelf) if id(each) == first)).nbytes
        self._spare_bytes -= size
        self.owned_bytes -= size

    def _make(self, key: _Shelf, home: torch.device) -> torch.Tensor:
        dtype, numel, _, is_pinned = key
        if is_pinned:
            return devices.pinned(numel, dtype)
        if self._is_returned(key) and home.type == "cpu":
            return host_memory.empty(numel, dtype, is_brief=True)
        return torch.empty(numel, dtype=dtype, device=home)

    def _is_returned(self, key: _Shelf) -> bool:
        dtype, numel, is_host, is_pinned = key
        return self._returns and is_host and not is_pinned and numel * dtype.itemsize >= LEAST_RETURNED_BYTES

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that `take` handed out.

        Raises:
            StoreError: the buffer was not taken from here, or is given back twice.
        """
        with self._lock:
            if id(buffer) not in self._taken:
                msg = f"a buffer of {buffer.numel()} elements is given back that was not taken from this arena"
                raise StoreError(msg)
            key = self._taken.pop(id(buffer))
            self._used_bytes -= buffer.nbytes
            if self._is_returned(key):
                self._spare[id(buffer)] = key
                self._spare_bytes += buffer.nbytes
            if devices.is_on_device(buffer):
                self._last[id(buffer)] = devices.mark(self.device)
            self._free.setdefault(key, []).append(buffer)

    def lose(self, buffer: torch.Tensor) -> None:
        """Never hand `buffer` out again: a view of it is alive, and its memory is freed with the last one."""
        with self._lock:
            if id(buffer) in self._taken:
                del self._taken[id(buffer)]
                self._used_bytes -= buffer.nbytes
                self.owned_bytes -= buffer.nbytes

    @property
    def taken_count(self) -> int:
        """Number of buffers in use."""
        return len(self._taken)

    def trim(self) -> None:
        """Free unused buffers."""
        with self._lock:
            for shelf in self._free.values():
                self.owned_bytes -= sum(buffer.nbytes for buffer in shelf)
            self._free.clear()
            self._last.clear()
            self._spare.clear()
            self._spare_bytes = 0
