"""Verbs on tensors of a device between ranks of one node that have mapped each other's memory of devices.

Each rank has a window of two slots. It copies its part into a slot, all hosts meet, and each rank reads the slots of
the others on its device; sums are made straight from them. Hosts wait for each other, not for devices, whose order is
kept by signals: before a slot is read, a stream follows the "filled" of its owner; before it is filled again, the
"read" of all. A signal is followed only after a meeting that came after it was set. One meeting a piece is enough: when
a slot's turn comes again, all ranks have met since they queued what they read from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends.mapped_messages import Messages
from mpispeed.mesh.backends.meetings import CODES, Meetings, open_meetings
from mpispeed.mesh.collectives.device_path import DevicePath
from mpispeed.mesh.collectives.group import Group
from mpispeed.mesh.collectives.host_collectives import is_own_cut
from mpispeed.mesh.collectives.transport import EXCHANGE_TAG, Pairs, Posted, Transport
from mpispeed.mesh.collectives.work import nap_until
from mpispeed.native import device_sum
from mpispeed.native.mapped_memory import Mapper, Signal
from mpispeed.native.mappers import mapper_for

T = TypeVar("T")

SLOT_BYTES = 16 << 20
"""What a rank puts into a slot at a time: a hundred times what a meeting costs a device of 3 TB/s."""

ONE_SHOT_BYTES = 1 << 20
"""Up to so many bytes of all ranks together each rank sums the whole: one meeting instead of two."""

ALIGNMENT = 64
"""Elements that columns of a slot are a multiple of, so that kernels use their widest accesses."""


PROBE_BYTES = 4096


def open_mapped(group: Group, device: torch.device) -> MappedPath:
    """A path for `group`, after a little memory of each rank was mapped in all of them.

    Windows are made at the first verb that needs them, as most groups of a mesh have none.

    Collective over: `group`.

    Raises:
        CommError: on all ranks, if any of them cannot; says which and why.
    """
    transport = group.transport
    if not transport.shares_memory:
        msg = f"{group} is not on one node, so its ranks cannot map each other's memory of devices"
        raise CommError(msg)
    opened = open_meetings(transport, transport.waiting, 0, Messages.shared_bytes(transport.size))
    if opened is None:
        msg = "ranks of the node cannot share host memory in /dev/shm, in which they meet"
        raise CommError(msg)
    mapper = _attempt(transport, lambda: mapper_for(device))
    try:
        _exchange_windows(transport, mapper, PROBE_BYTES)
    except CommError:
        _give_back(transport, mapper)
        raise
    return MappedPath(group, mapper, *opened)


def _give_back(transport: Transport, mapper: Mapper) -> None:
    """Unmap, then free. Collective over: the group."""
    mapper.let_go()
    transport.library_barrier()
    mapper.free()


def _exchange_windows(transport: Transport, mapper: Mapper, slot_bytes: int) -> list[_Window]:
    """The windows of all ranks, mapped here. Collective over: the group.

    Raises:
        CommError: on all ranks, if any of them cannot.
    """
    own, told = _attempt(transport, lambda: _make_window(mapper, slot_bytes))
    everyone = transport.library_gather_objects(told)
    return _attempt(
        transport,
        lambda: [own if rank == transport.rank else _open_window(mapper, each) for rank, each in enumerate(everyone)],
    )


class _Told(NamedTuple):
    """Bytes and handles by which the window of a rank is opened."""

    nbytes: int
    memory: bytes
    filled: tuple[bytes, ...]
    read: tuple[bytes, ...]


class _Window(NamedTuple):
    """The window of a rank, as mapped here; by turn."""

    slots: tuple[torch.Tensor, ...]
    filled: tuple[Signal, ...]
    read: tuple[Signal, ...]


def _make_window(mapper: Mapper, slot_bytes: int) -> tuple[_Window, _Told]:
    """The window of this rank, and what others are told of it."""
    memory, handle = mapper.allocate(2 * slot_bytes)
    filled, read = ((mapper.make_signal(), mapper.make_signal()) for _ in range(2))
    told = _Told(2 * slot_bytes, handle, tuple(x.handle for x in filled), tuple(x.handle for x in read))
    return _Window(memory.chunk(2), filled, read), told


def _open_window(mapper: Mapper, told: _Told) -> _Window:
    """The window of another rank."""
    memory = mapper.open(told.memory, told.nbytes)
    signals = [tuple(mapper.open_signal(handle) for handle in handles) for handles in (told.filled, told.read)]
    return _Window(memory.chunk(2), *signals)


class MappedPath(DevicePath):
    """Verbs through mapped windows, and messages through mapped boxes."""

    name = "mapped"

    def __init__(self, group: Group, mapper: Mapper, meetings: Meetings, shared: torch.Tensor) -> None:
        """Made by `open_mapped`."""
        super().__init__(group.rank, group.size, mapper.device)
        self.waits_on_host = mapper.waits_on_host
        self._transport, self._mapper, self._meetings = group.transport, mapper, meetings
        self._slot_bytes, self._turn, self._windows = SLOT_BYTES, 0, list[_Window]()
        self._messages = Messages(group.transport, mapper, shared)

    # -- a slot's turn --

    def _begin(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The own slot of the next turn, once all have read what was in it. Shapes: [count]."""
        if not self._windows:
            self._windows = _exchange_windows(self._transport, self._mapper, self._slot_bytes)
        self._turn ^= 1
        for window in self._windows:
            window.read[self._turn].follow()
        return self._at(self.rank, dtype, count)

    def _at(self, rank: int, dtype: torch.dtype, count: int, turn: int | None = None) -> torch.Tensor:
        """The slot of a rank. Shapes: [count]."""
        slot = self._windows[rank].slots[self._turn if turn is None else turn]
        return slot[: count * dtype.itemsize].view(dtype)

    def _meet(self, code: int, root: int | None = None) -> None:
        """Show the own slot and wait for the hosts of all others; later work comes after what they filled."""
        self._windows[self.rank].filled[self._turn].set()
        self._meetings.meet(code)
        for rank, window in enumerate(self._windows):
            if rank != self.rank and root in (None, rank):
                window.filled[self._turn].follow()

    def _end(self, turn: int | None = None) -> None:
        """All that is read in a turn has been queued."""
        self._windows[self.rank].read[self._turn if turn is None else turn].set()

    def _width(self, dtype: torch.dtype) -> int:
        """Elements of a column so that those of all ranks fit a slot."""
        return max(self._slot_bytes // (self.size * dtype.itemsize) // ALIGNMENT * ALIGNMENT, 1)

    # -- verbs --

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """A slot of the own shard. Collective over: the group."""
        rows, step = out.view(self.size, shard.numel()), self._slot_bytes // shard.itemsize
        is_in_place = is_own_cut(out, shard, self.rank)
        for start in range(0, shard.numel(), step):
            piece = shard[start : start + step]
            self._begin(piece.dtype, piece.numel()).copy_(piece)
            self._meet(CODES["all_gather", "sum", torch.uint8] + shard.nbytes)
            for rank in self._others():
                rows[rank, start : start + step].copy_(self._at(rank, piece.dtype, piece.numel()))
            self._end()
        if not is_in_place:
            rows[self.rank].copy_(shard)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """A slot of columns, one for each rank. Collective over: the group."""
        parts, places = x.view(self.size, x.numel() // self.size), out.view(self.size, out.numel() // self.size)
        step = self._width(x.dtype)
        for start in range(0, parts.shape[1], step):
            piece = parts[:, start : start + step]
            self._begin(x.dtype, piece.numel()).view(piece.shape).copy_(piece)
            self._meet(CODES["all_to_all", "sum", torch.uint8] + x.nbytes)
            for rank in self._others():
                column = self._at(rank, x.dtype, piece.numel()).view(piece.shape)[self.rank]
                places[rank, start : start + step].copy_(column)
            self._end()
        places[self.rank].copy_(parts[self.rank])

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """A slot of the root. Collective over: the group."""
        step = self._slot_bytes // x.itemsize
        for start in range(0, x.numel(), step):
            piece = x[start : start + step]
            slot = self._begin(piece.dtype, piece.numel())
            if self.rank == root:
                slot.copy_(piece)
            self._meet(CODES["broadcast", "sum", torch.uint8] + x.nbytes, root)
            if self.rank != root:
                piece.copy_(self._at(root, piece.dtype, piece.numel()))
            self._end()

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
        """A slot of columns, of which each rank sums its own. Collective over: the group."""
        columns, step = full.view(self.size, shard.numel()), self._width(full.dtype)
        code = CODES["reduce_scatter", op, full.dtype] + full.nbytes
        for start in range(0, shard.numel(), step):
            piece = columns[:, start : start + step]
            self._begin(full.dtype, piece.numel()).view(piece.shape).copy_(piece)
            self._meet(code)
            device_sum.combine(shard[start : start + step], self._columns(full.dtype, piece.shape[1]), op, scale)
            self._end()

    def all_reduce(self, x: torch.Tensor, op: str, scale: float) -> None:
        """As a reduce-scatter whose sums go into the next slot, for all to read. Collective over: the group."""
        code = CODES["all_reduce", op, x.dtype] + x.nbytes
        if x.nbytes * self.size <= ONE_SHOT_BYTES and x.nbytes <= self._slot_bytes:
            if x.numel():
                self._begin(x.dtype, x.numel()).copy_(x)
                self._meet(code)
                parts = [self._at(rank, x.dtype, x.numel()) for rank in range(self.size)]
                device_sum.combine(x, parts, op, scale)
                self._end()
            return
        step = self._width(x.dtype) * self.size
        for start in range(0, x.numel(), step):
            piece = x[start : start + step]
            width = -(-piece.numel() // self.size)
            width = -(-width // ALIGNMENT) * ALIGNMENT if width > ALIGNMENT else width
            self._begin(x.dtype, piece.numel()).copy_(piece)  # what the last column lacks is summed, and not read
            self._meet(code)
            first, parts = self._turn, self._columns(x.dtype, width)
            device_sum.combine(self._begin(x.dtype, width), parts, op, scale)
            self._end(first)
            self._meet(code)
            for rank, place in enumerate(torch.split(piece, width)):
                place.copy_(self._at(rank, x.dtype, place.numel()))
            self._end()

    def _columns(self, dtype: torch.dtype, width: int) -> list[torch.Tensor]:
        """What all ranks have for this one. Shapes: [width] each."""
        begin = self.rank * width
        return [self._at(rank, dtype, self.size * width)[begin : begin + width] for rank in range(self.size)]

    def exchange(self, sends: Pairs, recvs: Pairs) -> None:
        """Messages. Collective over: the group."""
        arriving = [self.post_recv(x, src, EXCHANGE_TAG) for x, src in recvs]
        posted = [self.post_send(x, dst, EXCHANGE_TAG) for x, dst in sends]
        for message in [*arriving, *posted]:
            _settle(message)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """Copied into a box; the host does not wait for the receiver."""
        _settle(self.post_send(x, dst, tag))

    def recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """The host waits for the host of the sender."""
        _settle(self.post_recv(x, src, tag))

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Posted:
        """Copied into a box now."""
        return self._messages.post_send(x, dst, tag)

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Posted:
        """Copied out of the box when it is waited for."""
        return self._messages.post_recv(x, src, tag)

    def close(self) -> None:
        """Unmap, then free. Collective over: the group."""
        # Only behind the barrier in it do events go, which CUDA forbids while another process may still use them.
        _give_back(self._transport, self._mapper)
        self._messages.close()
        self._meetings.close()
        self._windows.clear()

    def _others(self) -> list[int]:
        """The other ranks, each rank beginning with the one after it, so that not all read from one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def _settle(message: Posted) -> None:
    for poll in message.polls:
        nap_until(poll)
    if message.bring is not None:
        message.bring()


def _attempt(transport: Transport, fn: Callable[[], T]) -> T:
    """The result of `fn`, if all ranks have one. Collective over: the group.

    Raises:
        CommError: on all ranks; with the text of the first that failed.
    """
    found, text = None, ""
    try:
        found = fn()
    except Exception as error:  # whatever it is: the other ranks go on to the next exchange
        text = f"{type(error).__name__}: {error}"
    texts = transport.library_gather_objects(text)
    failed = [rank for rank, said in enumerate(texts) if said]
    if failed or found is None:
        msg = (
            f"memory of devices cannot be mapped by all ranks: rank {failed[0]} of {transport.size}: {texts[failed[0]]}"
        )
        raised = CommError(msg)
        raised.is_collective = True
        raise raised
    return found
