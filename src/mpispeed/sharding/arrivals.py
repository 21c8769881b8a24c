"""Gradients of a device on their way into accumulators in host memory or in swap files: in their own dtype."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import device as devices
from mpispeed.mesh.collectives.host_collectives import HALF_FLOATS
from mpispeed.native import exact_squares
from mpispeed.store.layout import BLOCK
from mpispeed.store.stored_tensor import MemoryTensor, widen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpispeed.mesh.comm import Comm
    from mpispeed.store.stored_tensor import Lease, StoredTensor


_SQUARED = 1 << 22
"""Elements that are squared at a time: without kernels there are temporaries, and this is beside the backward pass."""


def start_fetch(comm: Comm, out: torch.Tensor, x: torch.Tensor) -> Any | None:
    """Start to copy `x` of a device into host memory; gives the event to wait for before `out` is read, or None.

    Not blocking where `out` is page-locked; other memory is filled through page-locked windows.

    Collective over: `comm`, which is this rank alone.
    Shapes: as each other, of one dtype.
    """
    if out.is_pinned():
        out.copy_(x, non_blocking=True)
        return devices.mark(x.device)
    comm.reduce_scatter(out, x)
    return None


def fetch(comm: Comm, out: torch.Tensor, x: torch.Tensor) -> None:
    """`start_fetch`, waited for. Collective over: `comm`, which is this rank alone."""
    event = start_fetch(comm, out, x)
    if event is not None:
        event.synchronize()


class FetchedLease:
    """A range of gradients that rest on a device, on its way into page-locked host memory since it was lent."""

    __slots__ = ("_arrived", "_values")

    def __init__(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Args: `dtype` is one that holds the same values in fewer bytes, to travel in."""
        values = values if dtype is None else values.to(dtype)
        self._values = devices.pinned(values.numel(), values.dtype).copy_(values, non_blocking=True)
        self._arrived: Any | None = devices.mark(values.device)

    def is_ready(self) -> bool:
        """True once `wait` would not block."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> torch.Tensor:
        """The values."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._values

    def give_back(self, *, changed: bool) -> None:
        """Do nothing: gradients are not changed by an update."""


class Arrivals:
    """Of one rank, by unit: copies that have not been waited for, narrow accumulators, squares taken on a device.

    The gradient of a unit that nothing is added to rests in the 16 bits in which it came, in the place of its
    accumulator: half of the bytes cross, and half are read by the update, which computes in fp32 all the same.
    Whoever needs it in the accumulator's dtype has it widened, without a change of any value.
    """

    def __init__(self) -> None:
        self._narrow: dict[int, StoredTensor] = {}
        self._events: dict[int, Any] = {}
        self._squares: dict[int, exact_squares.Started] = {}
        self._rounded: dict[int, torch.dtype] = {}
        self._stream: Any | None = None

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Queue what comes on a stream of its own, behind what this thread has queued, and beside what comes later."""
        if self._stream is None:
            self._stream = devices.module_of(device).Stream(device=device)
        begin = devices.mark(device)
        with devices.on_stream(device, self._stream):
            devices.follow(device, begin)
            yield

    @staticmethod
    def takes(stored: StoredTensor, values: torch.Tensor) -> bool:
        """True if `stored` can hold `values` of a device as they are, and is not there itself."""
        is_narrow = values.dtype in HALF_FLOATS and stored.dtype == torch.float32
        if not devices.is_on_device(values) or not (is_narrow or values.dtype == stored.dtype):
            return False
        is_away = stored.is_swapped or not devices.is_on_device(stored.get())
        return is_away and values.numel() == stored.numel

    def begin(self, index: int, stored: StoredTensor, dtype: torch.dtype) -> StoredTensor:
        """The stored tensor that a unit's gradients of this dtype are to be put into; what it had is lost."""
        self.drop(index)
        if dtype == stored.dtype:
            return stored
        self._narrow[index] = stored.narrowed(dtype)
        return self._narrow[index]

    def note(self, index: int, event: Any | None) -> None:
        """A copy into the unit's memory is under way until `event`."""
        if event is not None:
            self._events[index] = event

    def square(self, index: int, values: torch.Tensor) -> None:
        """Start to square gradients of a unit on their device."""
        self._squares[index] = exact_squares.start_square_partials(values.split(_SQUARED), block=BLOCK)

    def wait(self, index: int) -> None:
        """Wait for the unit's gradients, and no others."""
        event = self._events.pop(index, None)
        if event is not None:
            event.synchronize()

    def resting(self, index: int, stored: StoredTensor) -> StoredTensor:
        """What holds the unit's gradients now: `stored`, or its narrow form. They have arrived."""
        self.wait(index)
        return self._narrow.get(index, stored)

    def wide(self, index: int, stored: StoredTensor) -> torch.Tensor:
        """The unit's gradients in the dtype of `stored`: a copy of what is in a swap file, else its own memory.

        That may be written to, so squares that were taken before are dropped.
        """
        self.wait(index)
        if not isinstance(stored, MemoryTensor):
            return self._narrow.get(index, stored).get().to(stored.dtype)
        narrow = self._narrow.pop(index, None)
        if narrow is not None:
            widen(stored.get(), narrow.dtype)
        self._changes(index)
        return stored.get()

    def _changes(self, index: int) -> None:
        self._squares.pop(index, None)
        self._rounded.pop(index, None)

    def note_rounded(self, index: int, dtype: torch.dtype) -> None:
        """All gradients of a unit that rest on a device in fp32 are values of `dtype`."""
        if dtype in HALF_FLOATS:
            self._rounded[index] = dtype

    def lend(self, index: int, stored: StoredTensor, start: int, stop: int, home: torch.device) -> Lease:
        """A lease of a range of the unit's gradients; those of a device start to travel where `home` is the host."""
        lease = stored.lend(start, stop)
        if home.type != "cpu" or stored.is_swapped or not devices.is_on_device(lease.wait()):
            return lease
        return FetchedLease(lease.wait(), self._rounded.get(index))

    def drop(self, index: int) -> None:
        """Forget a unit's gradients: others come, in the dtype of its accumulator. Nothing writes there afterwards."""
        self.wait(index)
        self._narrow.pop(index, None)
        self._changes(index)

    def has_squares(self, index: int) -> bool:
        """True if a unit was squared on its device, and has not changed since."""
        return index in self._squares

    def squares(self, index: int) -> list[float] | None:
        """Partials of a unit that was squared on its device; None if it was not. Waits for them alone."""
        started = self._squares.get(index)
        return None if started is None else started.partials()

    def forget(self) -> None:
        """Drop what is known of the values of all units, because gradients begin anew."""
        self._squares.clear()
        self._rounded.clear()
