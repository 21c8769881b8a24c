"""One rank, no MPI: every verb is a copy or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.journal import Journal
from mpispeed.mesh.transport import Comparison, Pairs
from mpispeed.mesh.work import Poll


class SoloComm(Comm):
    """A group of one rank."""

    def __init__(
        self, rank: int = 0, axes: tuple[str, ...] = (), reduction: str = "ordered", journal: Journal | None = None
    ) -> None:
        super().__init__(0, (rank,), axes, reduction, journal or Journal())

    def swap_equal(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Copy."""
        out.copy_(x)

    def gather_equal(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy, unless it is in place."""
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)

    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Nothing to add."""

    def library_reduce(self, x: torch.Tensor, root: int, op: str) -> None:
        """Nothing to add."""

    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """Copy."""
        shard.copy_(full)

    def library_broadcast(self, x: torch.Tensor, root: int) -> None:
        """Nobody else."""

    def exchange_pairs(self, sends: Pairs, recvs: Pairs) -> None:
        """Nobody else."""

    def _refuse(self) -> CommError:
        return CommError("a group of one rank has nobody to send to or to receive from")

    def library_send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """Never reached: peers are checked before."""
        raise self._refuse()

    def library_recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """Never reached: peers are checked before."""
        raise self._refuse()

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Poll:
        """Never reached: peers are checked before."""
        raise self._refuse()

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Poll:
        """Never reached: peers are checked before."""
        raise self._refuse()

    def library_barrier(self) -> None:
        """Nobody else."""

    def library_share(self, obj: Any, root: int) -> Any:
        """The object itself."""
        return obj

    def library_gather_objects(self, obj: Any) -> list[Any]:
        """A list of one."""
        return [obj]

    def compare(self, code: int) -> Comparison:
        """Equal to itself."""
        return lambda: (code, code)

    def duplicate(self) -> Comm:
        """Another group of this rank."""
        return SoloComm(self.ranks[0], self.axes, self.reduction, self.journal).inherit(self)

    def split(self, color: int, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        """Another group of this rank."""
        del color
        return SoloComm(ranks[0], axes, self.reduction, self.journal).inherit(self)

    def close(self) -> None:
        """Nothing is held."""
