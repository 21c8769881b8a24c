"""Messages between devices of a node: a box of mapped memory, and a small host message that names it.

A sender copies into a box from which nothing is read any more, signals "filled" and sends the handles by MPI with the
tag of the message, so that MPI keeps the order. The receiver follows the signal on its device, copies, signals "taken"
and counts that in host memory that both share. Neither host waits for a device.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.transport import Posted, Transport
from mpispeed.mesh.collectives.work import in_this_mode, nap_until
from mpispeed.native.mapped_memory import HANDLE_BYTES, Mapper, Signal

BOXES = 64
"""Messages from one rank to another that may be under way; a sender of more waits until one is taken."""

LEAST_BYTES = 64 << 10
"""Size of the smallest box; others are powers of two times as large."""

ROW_BYTES = 2 * HANDLE_BYTES
"""What a box has in host memory: how often it was taken, and the handle of the receiver's signal."""

_NAME = struct.Struct(f"=qqq{HANDLE_BYTES}s{HANDLE_BYTES}s")
"""Box, bytes of the message, bytes of the box, handles of its memory and of "filled"."""


@dataclass(slots=True)
class _Box:
    """One box of this rank for another one."""

    memory: torch.Tensor
    handle: bytes
    filled: Signal
    taken: Signal | None = None
    sent: int = 0


@dataclass(slots=True)
class _Source:
    """A box of another rank, as mapped here."""

    memory: torch.Tensor
    handle: bytes
    filled: Signal
    taken: Signal


class Messages:
    """Boxes between all pairs of ranks of a group, made when they are needed."""

    def __init__(self, transport: Transport, mapper: Mapper, shared: torch.Tensor) -> None:
        """Args: `shared` is host memory of `shared_bytes` that all ranks have mapped, all zero."""
        self._transport, self._mapper = transport, mapper
        self._sending, self._taking = threading.Lock(), threading.Lock()
        rows = shared.view(transport.size, transport.size, BOXES, ROW_BYTES)  # sender, receiver, box
        self._sent_rows, self._received_rows = rows[transport.rank], rows[:, transport.rank]
        self._boxes: dict[int, list[_Box]] = {}
        self._sources: dict[tuple[int, int], _Source] = {}

    @staticmethod
    def shared_bytes(size: int) -> int:
        """Host memory of a group of so many ranks."""
        return size * size * BOXES * ROW_BYTES

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Posted:
        """Copy `x` into a box and send its name."""
        with self._sending:
            number = self._free_box(dst, x.nbytes)
            box = self._boxes[dst][number]
            if box.sent:
                box.taken = box.taken or self._mapper.open_signal(
                    _bytes_of(self._sent_rows[dst, number, HANDLE_BYTES:])
                )
                box.taken.follow()
            box.memory[: x.nbytes].copy_(x.view(torch.uint8))
            box.filled.set()
            box.sent += 1
        name = _NAME.pack(number, x.nbytes, box.memory.numel(), box.handle, box.filled.handle)
        message = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        return Posted([self._transport.post_send(message, dst, tag)], (x, message))

    def _free_box(self, dst: int, nbytes: int) -> int:
        """A box that was taken as often as it was sent, and holds so many bytes."""
        boxes = self._boxes.setdefault(dst, [])
        found: list[int] = []

        def poll() -> bool:
            free = [i for i, box in enumerate(boxes) if _count(self._sent_rows[dst, i]) == box.sent]
            found[:] = sorted(free, key=lambda i: (boxes[i].memory.numel() < nbytes, boxes[i].memory.numel()))
            return bool(found) or len(boxes) < BOXES

        nap_until(poll)
        if found and boxes[found[0]].memory.numel() >= nbytes:
            return found[0]
        capacity = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else LEAST_BYTES
        memory, handle = self._mapper.allocate(capacity)
        if len(boxes) < BOXES:
            boxes.append(_Box(memory, handle, self._mapper.make_signal()))
            return len(boxes) - 1
        # The memory before is kept to the end: the receiver has it mapped.
        boxes[found[0]].memory, boxes[found[0]].handle = memory, handle
        return found[0]

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Posted:
        """Wait for a name; copy out of its box when that has come."""
        message = torch.empty(_NAME.size, dtype=torch.uint8, device="cpu")
        poll = self._transport.post_recv(message, src, tag)
        return Posted([poll], (x, message), in_this_mode(lambda: self._take(x, src, message)))

    def _take(self, x: torch.Tensor, src: int, message: torch.Tensor) -> None:
        number, nbytes, capacity, memory, filled = _NAME.unpack(_bytes_of(message))
        if nbytes != x.nbytes:
            msg = f"a message of {nbytes} bytes has come from rank {src} of the group to a tensor of {x.nbytes} bytes"
            raise CommError(msg)
        with self._taking:
            source = self._source(src, number, capacity, memory, filled)
            source.filled.follow()
            x.view(torch.uint8).copy_(source.memory[:nbytes])
            source.taken.set()
            row = self._received_rows[src, number]
            row[:8].view(torch.int64).add_(1)

    def _source(self, src: int, number: int, capacity: int, memory: bytes, filled: bytes) -> _Source:
        """The box, mapped at its first message."""
        known = self._sources.get((src, number))
        if known is None:
            taken = self._mapper.make_signal()
            handle = torch.frombuffer(bytearray(taken.handle.ljust(HANDLE_BYTES, b"\0")), dtype=torch.uint8)
            self._received_rows[src, number, HANDLE_BYTES:].copy_(handle)
            opened = self._mapper.open(memory, capacity), memory, self._mapper.open_signal(filled), taken
            known = self._sources[src, number] = _Source(*opened)
        elif known.handle != memory:
            known.memory, known.handle = self._mapper.open(memory, capacity), memory
        return known

    def close(self) -> None:
        """Let go of all boxes."""
        self._boxes.clear()
        self._sources.clear()


def _count(row: torch.Tensor) -> int:
    return int(row[:8].view(torch.int64).item())


def _bytes_of(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()
