"""The verbs on tensors of a device where a group has no path for them: through pinned host buffers in windows.

A window is copied to the host while the one before it is sent, and results are copied back behind it: three buffers
take turns. Messages and the order of sums are those of the same verb on the host, so results are bitwise equal. Copies
are queued on the caller's current stream, so later work on it sees the results. One rank alone computes on the device
and copies nothing to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import device as devices
from mpispeed.base.device import is_on_device
from mpispeed.mesh.collectives import host_collectives
from mpispeed.mesh.collectives.work import in_this_mode

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.group import Group
    from mpispeed.mesh.collectives.transport import Posted

WINDOW_BYTES = 16 << 20
"""Most of a window: large enough for the link, small enough that the first copy is soon over."""

_SLACK = 16
"""For the alignment of parts of a window; with it a buffer has a power of two bytes, as page-locked memory comes."""

SLOTS = 3
"""One is filled, one travels, one is copied back."""

_OWN = threading.local()


class _Slot:
    """A pinned buffer, and the copies that still read it."""

    def __init__(self) -> None:
        self._memory, self._copied = torch.empty(0, dtype=torch.uint8), None

    def room(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` that no copy uses any more. Shapes: [nbytes]."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if self._memory.numel() < nbytes:
            with torch.inference_mode(False):  # it serves calls outside of that mode too
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
    """Split rows of `width` elements, together `row_bytes` per column; at least one window, maybe empty."""
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
    """Run the windows: `load` queues copies to the host, `run` is the verb there, `store` queues copies back."""
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


def all_reduce(group: Group, x: torch.Tensor, op: str, scale: float) -> None:
    """Combine `x` in place. Collective over: `group`."""
    device = _device_of(x)
    if group.size == 1:
        _scale(x, x, scale)
        return

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * x.itemsize)
        return _fill(window.take(window.width, x.dtype), x[window.start : window.stop])

    _carry(
        _windows(device, x.numel(), x.itemsize),
        load,
        lambda host: host_collectives.all_reduce(group, host, op, scale),
        lambda window, host: _fill(x[window.start : window.stop], host),
    )


def reduce(group: Group, x: torch.Tensor, root: int, op: str) -> None:
    """Combine into `x` of `root`; others keep theirs. Collective over: `group`."""
    device = _device_of(x)
    if group.size == 1:
        return

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * x.itemsize)
        return _fill(window.take(window.width, x.dtype), x[window.start : window.stop])

    def store(window: _Window, host: torch.Tensor) -> None:
        if group.rank == root:
            _fill(x[window.start : window.stop], host)

    _carry(
        _windows(device, x.numel(), x.itemsize),
        load,
        lambda host: host_collectives.reduce(group, host, root, op),
        store,
    )


def reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Combine `full` and keep this rank's shard, also where one of them is on the host. Collective over: `group`."""
    device = _device_of(shard, full)
    if group.size == 1:
        _scale(shard, full, scale)
        return
    columns = full.view(group.size, shard.numel())

    def load(window: _Window) -> tuple[torch.Tensor, torch.Tensor]:
        width = window.width
        window.claim(width * (group.size * full.itemsize + shard.itemsize))
        host = window.take(width * group.size, full.dtype)
        _fill(host.view(group.size, width), columns[:, window.start : window.stop])
        return host, window.take(width, shard.dtype)

    _carry(
        _windows(device, shard.numel(), group.size * full.itemsize + shard.itemsize),
        load,
        lambda held: host_collectives.reduce_scatter(group, held[1], held[0], op, scale),
        lambda window, held: _fill(shard[window.start : window.stop], held[1]),
    )


def move(out: torch.Tensor, x: torch.Tensor) -> None:
    """Copy flat `x` to `out` between a device and the host; `out` is complete where it is on the host."""
    _scale(out, x, 1.0)


def _scale(out: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """`scale * x`, rounded once, as a sum of one part is on the host; `out` is complete where it is on the host."""
    if out.device == x.device:
        if scale != 1.0:
            out.copy_(_times(x, scale))
        elif out.data_ptr() != x.data_ptr():
            out.copy_(x)
    elif is_on_device(x):
        _fetch(out.view(-1), x.view(-1), scale)
    else:
        _bring(out.view(-1), x.view(-1), scale)


def _times(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale * x`, not yet rounded to 16 bits."""
    return x if scale == 1.0 else (x.float() if x.itemsize == 2 else x) * scale


def _fetch(out: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """`scale * x` of a device into host memory.

    A single copy between dtypes would go through new pageable memory, and wait. Into pinned memory the device converts;
    into other memory values travel in the shorter dtype and are converted where they would be copied anyway.
    """
    if out.is_pinned():
        step = max(WINDOW_BYTES // out.itemsize, 1)
        for part, source in zip(torch.split(out, step), torch.split(x, step), strict=True):
            _fill(part, _times(source, scale).to(out.dtype))
        finish(x.device)
        return
    dtype = x.dtype if scale == 1.0 and x.itemsize < out.itemsize else out.dtype

    def load(window: _Window) -> tuple[torch.Tensor, torch.Tensor]:
        window.claim(window.width * dtype.itemsize)
        source = _times(x[window.start : window.stop], scale).to(dtype)
        return _fill(window.take(window.width, dtype), source), out[window.start : window.stop]

    _carry(
        _windows(x.device, x.numel(), dtype.itemsize),
        load,
        lambda held: held[1].copy_(held[0]),
        lambda window, held: None,
    )


def _bring(out: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """`scale * x` of the host into memory of a device; `x` may change afterwards."""
    if scale == 1.0 and out.dtype == x.dtype and x.is_pinned():
        _fill(out, x)
        finish(out.device)
        return
    for window in _windows(out.device, out.numel(), out.itemsize):
        window.claim(window.width * out.itemsize)
        host = window.take(window.width, out.dtype).copy_(_times(x[window.start : window.stop], scale))
        _fill(out[window.start : window.stop], host)
        window.slot.busy(devices.mark(out.device))


# -- moves -------------------------------------------------------------------------------------------------------


def broadcast(group: Group, x: torch.Tensor, root: int) -> None:
    """Copy `x` of `root` to all. Collective over: `group`."""
    device = _device_of(x)
    if group.size == 1:
        return

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * x.itemsize)
        host = window.take(window.width, x.dtype)
        return _fill(host, x[window.start : window.stop]) if group.rank == root else host

    def store(window: _Window, host: torch.Tensor) -> None:
        if group.rank != root:
            _fill(x[window.start : window.stop], host)

    _carry(
        _windows(device, x.numel(), x.itemsize), load, lambda host: host_collectives.broadcast(group, host, root), store
    )


def all_gather(group: Group, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order, also where one of the tensors is on the host. Collective over: `group`."""
    device = _device_of(out, shard)
    if group.size == 1:
        _scale(out, shard, 1.0)
        return
    columns = out.view(group.size, shard.numel())

    def load(window: _Window) -> torch.Tensor:
        window.claim(window.width * group.size * out.itemsize)
        host = window.take(window.width * group.size, out.dtype).view(group.size, window.width)
        _fill(host[group.rank], shard[window.start : window.stop])
        return host

    _carry(
        _windows(device, shard.numel(), group.size * out.itemsize),
        load,
        lambda host: host_collectives.all_gather(group, host.view(-1), host[group.rank]),
        lambda window, host: _fill(columns[:, window.start : window.stop], host),
    )


def all_to_all(
    group: Group, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, counts: Sequence[int] | None
) -> None:
    """Equal parts, or parts of given lengths. Collective over: `group`."""
    device = _device_of(out, x)
    if group.size == 1:
        _scale(out, x, 1.0)
        return
    if counts is not None:
        source, target = _fetched(x), devices.pinned(out.numel(), out.dtype)
        host_collectives.all_to_all(group, target, source, out_counts, counts)
        _fill(out, target)
        return
    cut = x.numel() // group.size
    sources, targets = x.view(group.size, cut), out.view(group.size, cut)

    def load(window: _Window) -> tuple[torch.Tensor, torch.Tensor]:
        window.claim(2 * window.width * group.size * x.itemsize)
        host, received = (window.take(window.width * group.size, x.dtype) for _ in range(2))
        _fill(host.view(group.size, window.width), sources[:, window.start : window.stop])
        return host, received

    _carry(
        _windows(device, cut, 2 * group.size * x.itemsize),
        load,
        lambda held: host_collectives.all_to_all(group, held[1], held[0], None, None),
        lambda window, held: _fill(targets[:, window.start : window.stop], held[1].view(group.size, window.width)),
    )


def gather(group: Group, out: torch.Tensor, shard: torch.Tensor, root: int) -> None:
    """Equal shards in rank order into `out` of `root`. Collective over: `group`."""
    is_root = group.rank == root
    host = devices.pinned(out.numel(), out.dtype) if is_root else out
    host_collectives.gather(group, host, _fetched(shard), root)
    if is_root:
        _fill(out, host)


def scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, root: int) -> None:
    """Equal parts of `full` of `root`, one for each rank. Collective over: `group`."""
    host = devices.pinned(shard.numel(), shard.dtype)
    host_collectives.scatter(group, host, _fetched(full) if group.rank == root else full, root)
    _fill(shard, host)


def send(group: Group, x: torch.Tensor, dst: int, tag: int) -> None:
    """One message, in the pieces that a receiver expects on any device."""
    for piece in host_collectives.pieces(x, group.limits.chunk_bytes):
        host_collectives.send(group, _fetched(piece), dst, tag)


def recv(group: Group, x: torch.Tensor, src: int, tag: int) -> None:
    """One message, in the pieces that a sender makes on any device."""
    for piece in host_collectives.pieces(x, group.limits.chunk_bytes):
        host = devices.pinned(piece.numel(), piece.dtype)
        host_collectives.recv(group, host, src, tag)
        _fill(piece, host)


def post_send(group: Group, x: torch.Tensor, dst: int, tag: int) -> Posted:
    """One message, not waited for.

    The copy to the host is waited for: a message that is posted later must not overtake this one.
    """
    return host_collectives.post_send(group, _fetched(x), dst, tag)


def post_recv(group: Group, x: torch.Tensor, src: int, tag: int) -> Posted:
    """One message, not waited for; it arrives in host memory and is brought into `x` from there."""
    host = devices.pinned(x.numel(), x.dtype)
    bring = in_this_mode(lambda: _fill(x, host))
    return host_collectives.post_recv(group, host, src, tag)._replace(bring=bring)


def _fetched(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` in pinned memory, complete; `x` itself where it is on the host."""
    if not is_on_device(x):
        return x
    host = _fill(devices.pinned(x.numel(), x.dtype).view(x.shape), x)
    finish(x.device)
    return host


def finish(device: torch.device) -> None:
    """Wait until the work queued by this thread is done."""
    devices.mark(device).synchronize()
