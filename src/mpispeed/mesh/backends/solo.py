"""One rank without MPI: every verb copies or does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.group import CommTrace, Group
from mpispeed.mesh.collectives.transport import Comparison, Pairs, Poll, Source, Transport
from mpispeed.mesh.comm import Comm

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.progress import Progress


def solo_comm(
    rank: int = 0,
    axes: tuple[str, ...] = (),
    reduction: str = "ordered",
    comm_trace: CommTrace | None = None,
    progress: Progress | None = None,
) -> Comm:
    """A group of world rank `rank` alone; with `progress` its verbs keep the order of that channel."""
    turn = None if progress is None else progress.drain
    return Comm(Group(SoloTransport(), (rank,), axes, reduction, comm_trace or CommTrace(), turn=turn), progress)


class SoloTransport(Transport):
    """Primitives of one rank."""

    def __init__(self) -> None:
        super().__init__(0, 1)

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

    def split(self, color: int, ranks: Sequence[int]) -> SoloTransport:
        """Another group of this rank."""
        del color, ranks
        return SoloTransport()

    def of_members(self, members: Sequence[int], ranks: Sequence[int], name: str) -> SoloTransport:
        """Another group of this rank."""
        del members, ranks, name
        return SoloTransport()

    def close(self) -> None:
        """Do nothing."""
