"""Sums and gathers of small tensors of ranks on one node, with one meeting each, through memory mapped by all of them.

Each rank copies its tensor into its slot, all meet, and each reads the slots of all in rank order straight into its
result: the tree over ranks of the ordered path, so the bits are the same.
"""

from __future__ import annotations

import torch

from mpispeed.mesh.backends.meetings import CODES, LINE_BYTES, Meetings, open_meetings
from mpispeed.mesh.collectives.host_collectives import combine
from mpispeed.mesh.collectives.transport import Fast, Transport, Waiting
from mpispeed.native import status
from mpispeed.native.flat import KINDS

SLOT_BYTES = 256 << 10
"""Most that a rank brings at a time. Each reads what all bring, so longer messages are better summed in parts."""

TOTAL_BYTES = 4 << 20
"""Most that one group maps; with many ranks on a node, slots get smaller instead."""


def open_slots(group: Transport, waiting: Waiting) -> SharedSlots | None:
    """Map memory in all ranks; None on every rank if any of them cannot.

    Collective over: `group`, whose ranks are on one node.
    """
    opened = open_meetings(group, waiting, min(SLOT_BYTES, TOTAL_BYTES // (2 * group.size)) // LINE_BYTES * LINE_BYTES)
    return None if opened is None else SharedSlots(group, opened[0])


class SharedSlots(Fast):
    """The slots of one group."""

    def __init__(self, group: Transport, meetings: Meetings) -> None:
        self._group, self._meetings = group, meetings
        self.limit_bytes = meetings.data.shape[-1]
        self._addresses = [[row.data_ptr() for row in rows] for rows in meetings.data]
        self._sums = status.compiled("fp_sum")

    def all_reduce(self, x: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine in place. Collective over: the group."""
        turn = self._meetings.meet(CODES["all_reduce", op, x.dtype] + x.nbytes, x)
        self._combine(x, turn, 0, x.dtype, op, scale, threads)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine and keep this rank's shard. Collective over: the group."""
        turn = self._meetings.meet(CODES["reduce_scatter", op, full.dtype] + full.nbytes, full)
        self._combine(shard, turn, self._group.rank * shard.numel() * full.itemsize, full.dtype, op, scale, threads)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Shards of all ranks in rank order. Collective over: the group."""
        out, shard = out.view(torch.uint8), shard.view(torch.uint8)
        turn = self._meetings.meet(CODES["all_gather", "sum", torch.uint8] + shard.nbytes, shard)
        out.view(self._group.size, -1).copy_(self._meetings.data[turn, :, : shard.numel()])

    def _combine(
        self, out: torch.Tensor, turn: int, start: int, dtype: torch.dtype, op: str, scale: float, threads: int
    ) -> None:
        """Reduce what lies in all slots from byte `start` on into `out`; the sum of floats without a tensor made."""
        if self._sums is not None and op == "sum" and dtype in KINDS:
            addresses = self._addresses[turn]
            parts = [at + start for at in addresses] if start else addresses
            count = out.numel()
            self._sums.tree_sum(out.data_ptr(), parts, count, KINDS[dtype], KINDS[out.dtype], scale, threads)
            return
        rows = self._meetings.data[turn, :, start : start + out.numel() * dtype.itemsize].view(dtype)
        combine(out, rows.unbind(), op, scale=scale, threads=threads)

    def close(self) -> None:
        """Let go of the memory."""
        self._meetings.close()
