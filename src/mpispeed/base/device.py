"""Device of this process: its memory, streams and events, for any kind of device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

HOST = torch.device("cpu")

IN_USE: list[torch.device] = []
"""The device that this process computes on, once something has told or shown it; a process has one."""


def is_on_device(x: torch.Tensor) -> bool:
    """True if `x` is neither in host memory nor without data."""
    return x.device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> Any:
    """Return torch.cuda or its counterpart for other kinds of devices; torch.cpu for the host."""
    return torch.get_device_module(device)


def use(device: torch.device) -> None:
    """Compute on `device` from now on: started verbs keep to the order of its streams."""
    if device.type not in ("cpu", "meta") and device not in IN_USE:
        IN_USE[:] = [device]


def notice(device: torch.device) -> None:
    """Note a tensor of `device`: this process computes there, unless it was told of another one."""
    if not IN_USE:
        use(device)


def used() -> torch.device | None:
    """The device of this process; None while it computes on the host."""
    return IN_USE[0] if IN_USE else None


def pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Pinned host memory, for copies that overlap with work; ordinary memory without a device. Shapes: [count]."""
    return torch.empty(count, dtype=dtype, device=HOST, pin_memory=bool(IN_USE))


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread's work for `device` is queued."""
    return module_of(device).current_stream(device)


def mark(device: torch.device) -> Any:
    """Record an event behind everything that this thread has queued so far."""
    event = module_of(device).Event(blocking=True)  # the host sleeps while it waits; others may need the core
    event.record(current_stream(device))
    return event


def follow(device: torch.device, event: Any) -> None:
    """Make this thread's later work on the device wait for `event`; the host does not wait."""
    current_stream(device).wait_event(event)


def on_stream(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Queue this thread's work for `device` on `stream` inside the block."""
    return nullcontext() if stream is None else module_of(device).stream(stream)


class Readback:
    """A number of a device that is copied to the host; reading it does not wait for later work."""

    def __init__(self, x: torch.Tensor) -> None:
        """Args: `x` has one element."""
        self._host = pinned(1, x.dtype).copy_(x.detach().reshape(1), non_blocking=True)
        self._arrived = mark(x.device)

    def __float__(self) -> float:
        self._arrived.synchronize()
        return float(self._host)


def start_reading(x: torch.Tensor) -> float | Readback:
    """Start to read the number in `x`, which has one element; `float` of the result may wait."""
    return Readback(x) if is_on_device(x) else float(x.detach())
