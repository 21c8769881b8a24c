"""Sums and gathers of ranks on one node through memory mapped by all of them.

Data pass through two small buffers in turn, in pieces that stay in cache: copied in once, summed by
the tree over ranks straight from everyone's slot, copied out once. With two buffers one meeting per piece is enough:
before a buffer is filled again, its rank has met all others after they emptied it.
"""

from __future__ import annotations

import torch

from mpispeed.mesh.backends.meetings import CODES, Meetings, open_meetings
from mpispeed.mesh.collectives.host_collectives import combine
from mpispeed.mesh.collectives.transport import Fast, Transport, Waiting

PIECE_BYTES = 8 << 20
"""What one rank puts into a buffer at a time: large enough that meetings cost little when ranks share cores."""

TOTAL_BYTES = 64 << 20
"""Most that one group maps; with many ranks on a node, pieces get smaller instead."""


def open_scratch(group: Transport, waiting: Waiting) -> SharedScratch | None:
    """Map one file of memory in all ranks; None on every rank if any of them cannot.

    Collective over: `group`, whose ranks are on one node.
    """
    piece_bytes = min(PIECE_BYTES, TOTAL_BYTES // (2 * (group.size + 1))) // 4096 * 4096
    opened = open_meetings(group, waiting, 0, 2 * (group.size + 1) * piece_bytes)
    return None if opened is None else SharedScratch(group, *opened, piece_bytes)


class SharedScratch(Fast):
    """The shared buffers of one group. Shapes: 2 buffers of size + 1 slots of `piece_bytes`; the last holds results."""

    def __init__(self, group: Transport, meetings: Meetings, memory: torch.Tensor, piece_bytes: int) -> None:
        self._group, self._meetings, self._piece_bytes = group, meetings, piece_bytes
        self._slots = memory.view(2, group.size + 1, piece_bytes)
        self._turn = 0

    def _buffer(self, dtype: torch.dtype, width: int) -> torch.Tensor:
        """The next buffer. Shapes: [size + 1, size, width]: slot of a rank, shard of a rank, elements."""
        self._turn ^= 1
        size = self._group.size
        return self._slots[self._turn].view(dtype)[:, : size * width].view(size + 1, size, width)

    def _width(self, dtype: torch.dtype) -> int:
        """Elements of one shard so that a piece of all shards fits a slot; a multiple of a cache line."""
        return max(1, self._piece_bytes // (self._group.size * dtype.itemsize) // 16 * 16)

    def all_reduce(self, x: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine in place. Collective over: the group."""
        size, rank, window = self._group.size, self._group.rank, self._width(x.dtype) * self._group.size
        code = CODES["all_reduce", op, x.dtype] + x.nbytes
        for start in range(0, x.numel(), window):
            piece = x[start : start + window]
            width = -(-piece.numel() // size)
            buffer = self._buffer(x.dtype, width)
            slot, result, own = buffer[rank], buffer[size], buffer[rank, rank]
            if piece.numel() == slot.numel():
                cuts = piece.view(size, width)
                own = cuts[rank]
                slot[:rank].copy_(cuts[:rank])
                slot[rank + 1 :].copy_(cuts[rank + 1 :])
            else:
                slot.view(-1)[: piece.numel()].copy_(piece)
            self._meetings.meet(code)
            parts = [own if r == rank else buffer[r, rank] for r in range(size)]
            combine(result[rank], parts, op, scale=scale, threads=threads)
            self._meetings.meet(code)
            piece.copy_(result.view(-1)[: piece.numel()])

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine and keep this rank's shard. Collective over: the group."""
        size, rank, width = self._group.size, self._group.rank, self._width(full.dtype)
        code = CODES["reduce_scatter", op, full.dtype] + full.nbytes
        columns = full.view(size, -1)
        for start in range(0, shard.numel(), width):
            piece = columns[:, start : start + width]
            buffer = self._buffer(full.dtype, piece.shape[1])
            buffer[rank, :rank].copy_(piece[:rank])
            buffer[rank, rank + 1 :].copy_(piece[rank + 1 :])
            self._meetings.meet(code)
            parts = [piece[rank] if r == rank else buffer[r, rank] for r in range(size)]
            combine(shard[start : start + width], parts, op, scale=scale, threads=threads)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Shards of all ranks in rank order. Collective over: the group."""
        size, rank = self._group.size, self._group.rank
        columns, window = out.view(size, -1), self._piece_bytes // shard.itemsize
        code = CODES["all_gather", "sum", torch.uint8] + shard.nbytes
        is_in_place = columns[rank].data_ptr() == shard.data_ptr()
        for start in range(0, shard.numel(), window):
            piece = shard[start : start + window]
            self._turn ^= 1
            slots = self._slots[self._turn].view(shard.dtype)[:, : piece.numel()]
            slots[rank].copy_(piece)
            self._meetings.meet(code)
            for other in range(size):
                if other != rank:
                    columns[other, start : start + window].copy_(slots[other])
            if not is_in_place:
                columns[rank, start : start + window].copy_(piece)

    def close(self) -> None:
        """Let go of the memory; it is unmapped with the last view of it."""
        self._meetings.close()
        self._slots = torch.empty(0, dtype=torch.uint8)
