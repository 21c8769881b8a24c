"""Transport of one rank without MPI: every verb copies or does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.transport import Comparison, Pairs, Source
from mpispeed.mesh.collectives.work import Poll
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.trace.comm_trace import CommTrace

if TYPE_CHECKING:
    from typing_extensions import Self


class SoloComm(Comm):
    """A group of one rank."""

    def __init__(
        self, rank: int = 0, axes: tuple[str, ...] = (), reduction: str = "ordered", comm_trace: CommTrace | None = None
    ) -> None:
        super().__init__(0, (rank,), axes, reduction, comm_trace or CommTrace())

    def alltoall(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Copy."""
        out.copy_(x)

    def allgather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy, unless it is in place."""
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)

    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Do nothing."""

    def library_reduce(self, x: torch.Tensor, root: int, op: str) -> None:
        """Do nothing."""

    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """Copy."""
        shard.copy_(full)

    def library_broadcast(self, x: torch.Tensor, root: int) -> None:
        """Do nothing."""

    def exchange_pairs(self, sends: Pairs, recvs: Pairs) -> None:
        """Do nothing."""

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

    def post_recv_any(self, x: torch.Tensor, tag: int) -> Source:
        """Refuse: there is nobody who could send."""
        raise self._refuse()

    def library_barrier(self) -> None:
        """Do nothing."""

    def library_share(self, obj: Any, root: int) -> Any:
        """The object itself."""
        return obj

    def library_gather_objects(self, obj: Any) -> list[Any]:
        """A list of one."""
        return [obj]

    def compare(self, code: int) -> Comparison:
        """A comparison that is always equal."""
        return lambda: (code, code)

    def split(self, color: int, ranks: Sequence[int], axes: tuple[str, ...]) -> Self:
        """Another group of this rank."""
        del color
        return type(self)(ranks[0], axes, self.reduction, self.comm_trace).inherit(self)

    def of_members(self, members: Sequence[int], name: str, axes: tuple[str, ...]) -> Self:
        """Another group of this rank."""
        del members, name
        return self.split(0, self.ranks, axes)

    def close(self) -> None:
        """Do nothing."""
