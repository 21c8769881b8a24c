"""Reusable scratch buffers."""

from __future__ import annotations

import threading
from typing import Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import StoreError


class Arena:
    """Flat scratch tensors by dtype and size.

    Buffers are given back by the progress thread as well as by the caller, hence the lock. On a device, the stream of
    the taker waits for work that the last user queued. On meta all buffers are there.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._free: dict[tuple[torch.dtype, int, bool], list[torch.Tensor]] = {}
        self._last: dict[int, Any] = {}  # id of a free buffer -> event behind its last use
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        self.owned_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, *, on_host: bool = False) -> torch.Tensor:
        """A flat tensor of `numel` elements with unspecified content, in host memory if asked for."""
        with self._lock:
            home = devices.HOST if on_host and self.device.type != "meta" else self.device
            is_host = home.type in ("cpu", "meta")
            shelf = self._free.get((dtype, numel, is_host))
            if shelf:
                buffer = shelf.pop()
                event = self._last.pop(id(buffer), None)
                if event is not None:
                    devices.follow(self.device, event)
            else:
                with torch.inference_mode(False):  # it may be taken for training later
                    buffer = torch.empty(numel, dtype=dtype, device=home)
                self.owned_bytes += buffer.nbytes
            self._taken.add(id(buffer))
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
            self._taken.remove(id(buffer))
            is_host = not devices.is_on_device(buffer)
            if not is_host:
                self._last[id(buffer)] = devices.mark(self.device)
            self._free.setdefault((buffer.dtype, buffer.numel(), is_host), []).append(buffer)

    def lose(self, buffer: torch.Tensor) -> None:
        """Never hand `buffer` out again: a view of it is alive, and its memory is freed with the last one."""
        with self._lock:
            if id(buffer) in self._taken:
                self._taken.remove(id(buffer))
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
