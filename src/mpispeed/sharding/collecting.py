"""Collection of updated parameters, from the ranks that updated parts of them to all that compute with them.

Source: the meaning of `allgather_partitions` and `allgather_bucket_size` in the documentation of DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.store.arena import Arena
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.placement import Placement


@dataclass(frozen=True, slots=True)
class Collecting:
    """The messages that bring equal parts of a range, one of each rank, to all of them.

    Attributes:
        most_elements: of one message, counted on the receiving side; None: no limit.
        by_broadcast: each owner in turn broadcasts its part; False: all-gather.
    """

    most_elements: int | None = None
    by_broadcast: bool = False

    def piece(self, part: int, ranks: int) -> int:
        """Elements of a part in one message: at least one, whatever the limit."""
        if self.most_elements is None:
            return part
        return min(part, max(1, self.most_elements if self.by_broadcast else self.most_elements // ranks))

    def buffer_elements(self, part: int, ranks: int) -> int:
        """Length of the buffer that pieces of an all-gather arrive in; 0 if none is needed."""
        piece = self.piece(part, ranks)
        return 0 if self.by_broadcast or piece == part or ranks == 1 else piece * ranks


class Collector:
    """Carries out a `Collecting`; keeps the buffer that pieces arrive in."""

    def __init__(self, how: Collecting | None = None, device: torch.device = devices.HOST) -> None:
        self._how = how or Collecting()
        self.arena = Arena(device)

    def collect(
        self, mesh: Mesh, out: torch.Tensor, shard: torch.Tensor, source: Placement, target: Placement, padded: int
    ) -> None:
        """As `store.transfers.all_gather_into`.

        Collective over: the axes over which `source` is sharded and `target` is not.
        """
        all_gather_into(mesh, out, shard, source, target, padded, hop=self._hop)

    def _hop(self, comm: Comm, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Equal parts in rank order; `shard` may be its place in `out`. Collective over: `comm`."""
        if self._how.by_broadcast:
            self._broadcast(comm, out, shard)
            return
        numel = self._how.buffer_elements(shard.numel(), comm.size)
        if not numel:
            comm.all_gather(out, shard)
            return
        buffer = self.arena.take(numel, out.dtype, on_host=not devices.is_on_device(out))
        columns, step = out.view(comm.size, -1), numel // comm.size
        for start in range(0, shard.numel(), step):
            part = shard[start : start + step]
            arrived = buffer[: part.numel() * comm.size]
            comm.all_gather(arrived, part)
            columns[:, start : start + step].copy_(arrived.view(comm.size, -1))
        self.arena.give(buffer)

    def _broadcast(self, comm: Comm, out: torch.Tensor, shard: torch.Tensor) -> None:
        parts, step = out.view(comm.size, -1), self._how.piece(shard.numel(), comm.size)
        if parts[comm.rank].data_ptr() != shard.data_ptr():
            parts[comm.rank].copy_(shard)
        for owner in range(comm.size):
            for start in range(0, shard.numel(), step):
                comm.broadcast(parts[owner][start : start + step], owner)
