"""Tensors of a device by their addresses, where the MPI library reads and writes memory of devices itself."""

from __future__ import annotations

import torch

from mpispeed.mesh.collectives import host_collectives
from mpispeed.mesh.collectives.device_collectives import finish
from mpispeed.mesh.collectives.device_path import DevicePath
from mpispeed.mesh.collectives.group import Group
from mpispeed.mesh.collectives.host_collectives import is_own_cut, pieces
from mpispeed.mesh.collectives.transport import Pairs, Posted


class PointerPath(DevicePath):
    """Moves of MPI on addresses of a device; sums are made of them on the device.

    MPI knows no streams, so the host waits for the work that was queued before each move.
    """

    name = "pointers"

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group.rank, group.size, device)
        self._group, self._transport = group, group.transport

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """MPI_Allgather, or messages where the whole is too large for one call. Collective over: the group."""
        finish(self.device)
        if out.nbytes <= self._group.limits.chunk_bytes:
            self._transport.allgather(out, shard)
            return
        rows = out.view(self.size, shard.numel())
        if not is_own_cut(out, shard, self.rank):
            rows[self.rank].copy_(shard)
        others = self._others()
        self.exchange([(shard, j) for j in others], [(rows[j], j) for j in reversed(others)])

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """MPI_Alltoall, or messages likewise. Collective over: the group."""
        finish(self.device)
        if out.nbytes <= self._group.limits.chunk_bytes:
            self._transport.alltoall(out, x)
            return
        parts, places = x.view(self.size, -1), out.view(self.size, -1)
        places[self.rank].copy_(parts[self.rank])
        others = self._others()
        self.exchange([(parts[j], j) for j in others], [(places[j], j) for j in reversed(others)])

    def exchange(self, sends: Pairs, recvs: Pairs) -> None:
        """MPI_Isend and MPI_Irecv of all. Collective over: the group."""
        finish(self.device)
        limit = self._group.limits.chunk_bytes
        cut = [[(piece, j) for x, j in pairs for piece in pieces(x, limit)] for pairs in (sends, recvs)]
        self._transport.exchange_pairs(*cut)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """MPI_Bcast. Collective over: the group."""
        finish(self.device)
        host_collectives.broadcast(self._group, x, root)

    def send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """MPI_Send."""
        finish(self.device)
        host_collectives.send(self._group, x, dst, tag)

    def recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """MPI_Irecv, waited for."""
        finish(self.device)
        host_collectives.recv(self._group, x, src, tag)

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Posted:
        """MPI_Isend."""
        finish(self.device)
        return host_collectives.post_send(self._group, x, dst, tag)

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Posted:
        """MPI_Irecv."""
        finish(self.device)
        return host_collectives.post_recv(self._group, x, src, tag)

    def close(self) -> None:
        """Nothing was opened."""

    def _others(self) -> list[int]:
        """The other ranks, each rank beginning with the one after it."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]
