"""A started verb and the streams of a device: it begins after what its starter had queued, and is waited for so too.

Each thread that carries verbs out has a stream of its own, so that copies run beside the work of the starter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpispeed.base import device as devices

if TYPE_CHECKING:
    import torch

    from mpispeed.mesh.comm import Comm

_OWN = threading.local()


class Handover:
    """What one started verb has to come after, and what has to come after it."""

    def __init__(self, device: torch.device) -> None:
        """Note what this thread has queued."""
        self._device, self._begin = device, devices.mark(device)
        self._end: Any = None
        self._held: Any = None

    def carrying(self, fn: Callable[[Comm], object]) -> Callable[[Comm], object]:
        """`fn`, on the stream of the thread that calls it; what it holds is held until `join`.

        Memory that the lane's stream still works on would otherwise go back to the stream it came from.
        """
        self._held = fn

        def carried(comm: Comm) -> None:
            with devices.on_stream(self._device, _own_stream(self._device)):
                devices.follow(self._device, self._begin)
                try:
                    fn(comm)
                finally:
                    self._end = devices.mark(self._device)

        return carried

    def join(self) -> None:
        """What this thread queues from now on comes after the verb. Not blocking."""
        if self._end is not None:
            devices.follow(self._device, self._end)
        self._held = None


def begin() -> Handover | None:
    """For a verb that is started now; None where this process uses no device."""
    device = devices.used()
    return None if device is None else Handover(device)


def _own_stream(device: torch.device) -> Any:
    streams = _OWN.__dict__.setdefault("streams", {})
    if device not in streams:
        # A thread begins at the first device of the node: calls there would leave a context in its memory.
        devices.module_of(device).set_device(device)
        streams[device] = devices.module_of(device).Stream(device=device)
    return streams[device]
