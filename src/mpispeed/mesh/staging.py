"""The verbs on tensors of a device: through pinned host buffers in windows, or by address where MPI can read them.

A window is copied to the host while the one before it travels, and results are copied back behind it: three buffers
take turns. What travels, and the order of sums, is that of the same verb on the host, so results are equal to the bit.
Copies are queued on the caller's current stream; what it queues afterwards finds the results. One rank alone computes
on the device and copies nothing to the host.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.device import is_on_device
from mpispeed.mesh import hosted, messages

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.work import Poll

WINDOW_BYTES = 16 << 20
"""Most of a window: large enough for the link, small enough that the first copy is soon over."""

_SLACK = 16
"""For the alignment of parts of a window; with it a buffer has a power of two bytes, as page-locked memory comes."""

SLOTS = 3
"""One is filled, one travels, one is copied back."""

POINTERS = "MPISPEED_DEVICE_POINTERS"
"""Set to 1 where MPI takes addresses of device memory (`mpispeed doctor` tries it in a process of its own)."""

_OWN = threading.local()


def takes_pointers() -> bool:
    """True if addresses of device memory are handed to MPI, for verbs that only move bytes."""
    return os.environ.get(POINTERS, "") == "1"


class _Slot:
    """A pinned buffer, and the copies that still read it."""

    def __init__(self) -> None:
        self._memory, self._copied = torch.empty(0, dtype=torch.uint8), None

    def room(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` that nothing looks at any more. Shapes: [nbytes]."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if self._memory.numel() < nbytes:
            self._memory = devices.pinned(nbytes, torch.uint8)
        return self._memory[:nbytes]

    def busy(self, event: Any) -> None:
        """Copies up to `event` read the buffer."""
        self._copied = event


class _Window:
    """Elements `start` to `stop` of every row, in a slot."""

    def __init__(self, device: torch.device, slot: _Slot, start: int, stop: int) -> None:
        self.device, self.slot, self.start, self.stop = device, slot, start, stop
        self._used, self._memory = 0, torch.empty(0, dtype=torch.uint8)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.stop - self.start

    def claim(self, nbytes: int) -> None:
        """Take the slot, for `nbytes` in all."""
        self._memory, self._used = self.slot.room(nbytes + _SLACK), 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Part of the slot. Shapes: [count]."""
        begin = -(-self._used // dtype.itemsize) * dtype.itemsize
        self._used = begin + count * dtype.itemsize
        return self._memory[begin : self._used].view(dtype)


def _windows(device: torch.device, width: int, row_bytes: int) -> Iterator[_Window]:
    """Cut rows of `width` elements, of which one of each takes `row_bytes`; at least one window, maybe empty."""
    step = max((WINDOW_BYTES - _SLACK) // max(row_bytes, 1), 1)
    slots = _OWN.__dict__.setdefault("slots", [_Slot() for _ in range(SLOTS)])
    for number, start in enumerate(range(0, max(width, 1), step)):
        yield _Window(device, slots[number % SLOTS], start, min(start + step, width))


def _carry(
    windows: Iterator[_Window],
    load: Callable[[_Window], Any],
    run: Callable[[Any], object],
    store: Callable[[_Window, Any], object],
) -> None:
    """`load` queues copies to the host, `run` is the verb there, `store` queues copies back."""
    window = next(windows, None)
    ready = _load(window, load)
    while window is not None:
        following = next(windows, None)
        ahead = _load(following, load)
        held, event = ready
        event.synchronize()
        run(held)
        store(window, held)
        window.slot.busy(devices.mark(window.device))
        window, ready = following, ahead


def _load(window: _Window | None, load: Callable[[_Window], Any]) -> tuple[Any, Any]:
    if window is None:
        return None, None
    held = load(window)
    return held, devices.mark(window.device)


def _fill(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return target.copy_(source, non_blocking=True)


def _device_of(*tensors: torch.Tensor) -> torch.device:
    return next(x.device for x in tensors if is_on_device(x))


# -- sums --------------------------------------------------------------------------------------------------------


def all_reduce(comm: Comm, x: torch.Tensor, op: str, scale: float) -> None:
    """Combine `x` in place. Collective over: `comm`."""
    device = _device_of(x)
    if comm.size == 1:
        _scale(x, x, scale)
        return

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * x.itemsize)
        return _fill(window.take(window.width, x.dtype), x[window.start : window.stop])

    _carry(
        _windows(device, x.numel(), x.itemsize),
        load,
        lambda host: hosted.all_reduce(comm, host, op, scale),
        lambda window, host: _fill(x[window.start : window.stop], host),
    )


def reduce(comm: Comm, x: torch.Tensor, root: int, op: str) -> None:
    """Combine into `x` of `root`; others keep theirs. Collective over: `comm`."""
    device = _device_of(x)
    if comm.size == 1:
        return

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * x.itemsize)
        return _fill(window.take(window.width, x.dtype), x[window.start : window.stop])

    def store(window: _Window, host: torch.Tensor) -> None:
        if comm.rank == root:
            _fill(x[window.start : window.stop], host)

    _carry(_windows(device, x.numel(), x.itemsize), load, lambda host: hosted.reduce(comm, host, root, op), store)


def reduce_scatter(comm: Comm, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Combine `full` and keep the own cut, also where one of them is on the host. Collective over: `comm`."""
    device = _device_of(shard, full)
    if comm.size == 1:
        _scale(shard, full, scale)
        return
    columns = full.view(comm.size, shard.numel())

    def load(window: _Window) -> tuple[torch.Tensor, torch.Tensor]:
        width = window.width
        window.claim(width * (comm.size * full.itemsize + shard.itemsize))
        host = window.take(width * comm.size, full.dtype)
        _fill(host.view(comm.size, width), columns[:, window.start : window.stop])
        return host, window.take(width, shard.dtype)

    _carry(
        _windows(device, shard.numel(), comm.size * full.itemsize + shard.itemsize),
        load,
        lambda held: hosted.reduce_scatter(comm, held[1], held[0], op, scale),
        lambda window, held: _fill(shard[window.start : window.stop], held[1]),
    )


def _scale(out: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """`scale * x`, rounded once, as a sum of one part is on the host."""
    if scale != 1.0:
        wide = x.float() if x.itemsize == 2 else x
        out.copy_(wide * scale)
    elif out.data_ptr() != x.data_ptr():
        out.copy_(x)


# -- moves -------------------------------------------------------------------------------------------------------


def broadcast(comm: Comm, x: torch.Tensor, root: int) -> None:
    """Copy `x` of `root` to all. Collective over: `comm`."""
    device = _device_of(x)
    if comm.size == 1:
        return
    if takes_pointers():
        _finish(device)
        hosted.broadcast(comm, x, root)
        return

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * x.itemsize)
        host = window.take(window.width, x.dtype)
        return _fill(host, x[window.start : window.stop]) if comm.rank == root else host

    def store(window: _Window, host: torch.Tensor) -> None:
        if comm.rank != root:
            _fill(x[window.start : window.stop], host)

    _carry(_windows(device, x.numel(), x.itemsize), load, lambda host: hosted.broadcast(comm, host, root), store)


def all_gather(comm: Comm, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order, also where one of the tensors is on the host. Collective over: `comm`."""
    device = _device_of(out, shard)
    if comm.size == 1:
        _scale(out, shard, 1.0)
        return
    if takes_pointers() and out.nbytes <= comm.chunk_bytes:
        _finish(device)
        messages.all_gather(comm, out, shard)
        return
    columns = out.view(comm.size, shard.numel())

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * comm.size * out.itemsize)
        host = window.take(window.width * comm.size, out.dtype).view(comm.size, window.width)
        _fill(host[comm.rank], shard[window.start : window.stop])
        return host

    _carry(
        _windows(device, shard.numel(), comm.size * out.itemsize),
        load,
        lambda host: hosted.all_gather(comm, host.view(-1), host[comm.rank]),
        lambda window, host: _fill(columns[:, window.start : window.stop], host),
    )


def all_to_all(
    comm: Comm, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, counts: Sequence[int] | None
) -> None:
    """Equal parts, or parts of given lengths. Collective over: `comm`."""
    device = _device_of(out, x)
    if comm.size == 1:
        _scale(out, x, 1.0)
        return
    if takes_pointers() and (counts is not None or out.nbytes <= comm.chunk_bytes):
        _finish(device)
        hosted.all_to_all(comm, out, x, out_counts, counts)
        return
    if counts is not None:
        source, target = _fetched(x), devices.pinned(out.numel(), out.dtype)
        hosted.all_to_all(comm, target, source, out_counts, counts)
        _fill(out, target)
        return
    cut = x.numel() // comm.size
    sources, targets = x.view(comm.size, cut), out.view(comm.size, cut)

    def load(window: _Window) -> tuple[torch.Tensor, torch.Tensor]:
        window.claim(2 * window.width * comm.size * x.itemsize)
        host, received = (window.take(window.width * comm.size, x.dtype) for _ in range(2))
        _fill(host.view(comm.size, window.width), sources[:, window.start : window.stop])
        return host, received

    _carry(
        _windows(device, cut, 2 * comm.size * x.itemsize),
        load,
        lambda held: hosted.all_to_all(comm, held[1], held[0], None, None),
        lambda window, held: _fill(targets[:, window.start : window.stop], held[1].view(comm.size, window.width)),
    )


def send(comm: Comm, x: torch.Tensor, dst: int, tag: int) -> None:
    """One message, in the pieces that a receiver expects wherever its tensor is."""
    device = _device_of(x)
    if takes_pointers():
        _finish(device)
        hosted.send(comm, x, dst, tag)
        return
    for piece in messages.pieces(x, comm.chunk_bytes):
        hosted.send(comm, _fetched(piece), dst, tag)


def recv(comm: Comm, x: torch.Tensor, src: int, tag: int) -> None:
    """One message, in the pieces that a sender makes wherever its tensor is."""
    device = _device_of(x)
    if takes_pointers():
        _finish(device)
        hosted.recv(comm, x, src, tag)
        return
    for piece in messages.pieces(x, comm.chunk_bytes):
        host = devices.pinned(piece.numel(), piece.dtype)
        hosted.recv(comm, host, src, tag)
        _fill(piece, host)


def post_send(comm: Comm, x: torch.Tensor, dst: int, tag: int) -> tuple[list[Poll], torch.Tensor]:
    """One message, not waited for: its polls, and what has to be kept until they are over.

    The copy to the host is waited for: a message that is posted later must not overtake this one.
    """
    device = _device_of(x)
    host = x
    if takes_pointers():
        _finish(device)
    else:
        host = _fetched(x)
    return hosted.post_send(comm, host, dst, tag), host


def post_recv(
    comm: Comm, x: torch.Tensor, src: int, tag: int
) -> tuple[list[Poll], torch.Tensor, Callable[[], object] | None]:
    """One message, not waited for: its polls, where it arrives, and what then brings it into `x`."""
    device = _device_of(x)
    if takes_pointers():
        _finish(device)
        return hosted.post_recv(comm, x, src, tag), x, None
    host = devices.pinned(x.numel(), x.dtype)
    return hosted.post_recv(comm, host, src, tag), host, lambda: _fill(x, host)


def _fetched(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` in pinned memory, complete; `x` itself where it is on the host."""
    if not is_on_device(x):
        return x
    host = _fill(devices.pinned(x.numel(), x.dtype).view(x.shape), x)
    _finish(x.device)
    return host


def _finish(device: torch.device) -> None:
    """Until what this thread has queued is done."""
    devices.mark(device).synchronize()
