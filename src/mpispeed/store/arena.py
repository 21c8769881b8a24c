"""Reusable scratch buffers."""

from __future__ import annotations

import threading
from typing import Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError

_Shelf = tuple[torch.dtype, int, bool, bool]
"""Buffers alike: dtype, elements, whether in host memory, whether page-locked."""


class Arena:
    """Flat scratch tensors by dtype and size.

    Buffers are given back by the progress thread as well as by the caller, hence the lock. On a device, the stream of
    the taker waits for work that the last user queued. On meta all buffers are there.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._free: dict[_Shelf, list[torch.Tensor]] = {}
        self._last: dict[int, Any] = {}  # id of a free buffer -> event behind its last use
        self._taken: dict[int, _Shelf] = {}  # by id of a buffer
        self._lock = threading.Lock()
        self.owned_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, *, on_host: bool = False, pin: bool = False) -> torch.Tensor:
        """A flat tensor of `numel` elements with unspecified content, in host memory if asked for.

        `pin`: in host memory it is page-locked, where this process computes on a device.
        """
        with self._lock:
            home = devices.HOST if on_host and self.device.type != "meta" else self.device
            is_host = home.type in ("cpu", "meta")
            key = dtype, numel, is_host, pin and home.type == "cpu"
            shelf = self._free.get(key)
            if shelf:
                buffer = shelf.pop()
                event = self._last.pop(id(buffer), None)
                if event is not None:
                    devices.follow(self.device, event)
            else:
                with torch.inference_mode(False):  # it may be taken for training later
                    buffer = devices.pinned(numel, dtype) if key[3] else torch.empty(numel, dtype=dtype, device=home)
                self.owned_bytes += buffer.nbytes
            self._taken[id(buffer)] = key
            return buffer

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
            if devices.is_on_device(buffer):
                self._last[id(buffer)] = devices.mark(self.device)
            self._free.setdefault(key, []).append(buffer)

    def lose(self, buffer: torch.Tensor) -> None:
        """Never hand `buffer` out again: a view of it is alive, and its memory is freed with the last one."""
        with self._lock:
            if id(buffer) in self._taken:
                del self._taken[id(buffer)]
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
