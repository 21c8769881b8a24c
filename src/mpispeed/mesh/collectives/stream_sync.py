"""Stream order of started verbs on a device: after the caller's queued work, and before work queued after `wait`.

Each progress thread has a stream of its own, so that copies overlap with the caller's work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mpispeed.base import device as devices

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_OWN = threading.local()


class StreamSync:
    """Stream dependencies before and after one started verb."""

    def __init__(self, device: torch.device) -> None:
        """Note the work queued by this thread."""
        self._device, self._begin = device, devices.mark(device)
        self._end: Any = None
        self._held: Any = None

    def carrying(self, fn: Callable[[T], object]) -> Callable[[T], object]:
        """`fn`, on the stream of the thread that calls it; its buffers are held until `join`.

        Memory in use on the channel's stream would otherwise be reused on the stream it came from.
        """
        self._held = fn

        def carried(comm: T) -> None:
            with devices.on_stream(self._device, _own_stream(self._device)):
                devices.follow(self._device, self._begin)
                try:
                    fn(comm)
                finally:
                    self._end = devices.mark(self._device)

        return carried

    def join(self) -> None:
        """Make later work of this thread wait for the verb. Not blocking."""
        if self._end is not None:
            devices.follow(self._device, self._end)
        self._held = None


def begin() -> StreamSync | None:
    """Dependencies of a verb that is started now; None where this process uses no device."""
    device = devices.used()
    return None if device is None else StreamSync(device)


def _own_stream(device: torch.device) -> Any:
    streams = _OWN.__dict__.setdefault("streams", {})
    if device not in streams:
        # A new thread has the first device of the node current: calls there would create a context in its memory.
        devices.module_of(device).set_device(device)
        streams[device] = devices.module_of(device).Stream(device=device)
    return streams[device]
