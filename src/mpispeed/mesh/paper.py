"""One rank of a job that is not started: for predictions of what each rank would build. No values move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpispeed.mesh.backends.solo import SoloTransport
from mpispeed.mesh.collectives.group import CommTrace, Group
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import World


class PaperTransport(SoloTransport):
    """A group in which all other ranks bring the objects that this one brings; tensors stay as they are.

    Attributes:
        ranks: world ranks of the group.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        super().__init__()
        self.rank, self.size, self.ranks = rank, len(ranks), ranks

    def library_gather_objects(self, obj: Any) -> list[Any]:
        """The object for every rank."""
        return [obj] * self.size

    def split(self, color: int, ranks: Sequence[int]) -> PaperTransport:
        """The group of the given world ranks."""
        del color
        return PaperTransport(list(ranks).index(self.ranks[self.rank]), ranks)

    def of_members(self, members: Sequence[int], ranks: Sequence[int], name: str) -> PaperTransport:
        """The group of the given world ranks."""
        del members, name
        return PaperTransport(list(ranks).index(self.ranks[self.rank]), ranks)


def paper_world(rank: int, size: int) -> World:
    """The world of rank `rank` of `size`, all on one node. Local."""
    comm = Comm(Group(PaperTransport(rank, range(size)), range(size), ("world",), "ordered", CommTrace()))
    return World(comm, comm.split(0, range(size), ("node",)), node_count=1)
