"""One rank of a job that is not started: verbs check and count, and nothing moves.

The real parts of a run work on it with tensors on torch's meta device, so that what they would hold and send can be
read off. A group costs the same for any number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpispeed.mesh.backends.solo import SoloTransport
from mpispeed.mesh.collectives.group import CommTrace, Group
from mpispeed.mesh.collectives.progress import Progress
from mpispeed.mesh.collectives.work import Label, Ready, Work
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import World


class DryTransport(SoloTransport):
    """A group in which all other ranks bring the objects that this one brings; tensors stay as they are.

    Attributes:
        ranks: world ranks of the group.
    """

    moves = False

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        super().__init__()
        self.rank, self.size, self.ranks = rank, len(ranks), ranks

    def library_gather_objects(self, obj: Any) -> list[Any]:
        """The object for every rank."""
        return [obj] * self.size

    def split(self, color: int, ranks: Sequence[int]) -> DryTransport:
        """The group of the given world ranks."""
        del color
        return DryTransport(ranks.index(self.ranks[self.rank]), ranks)

    def of_members(self, members: Sequence[int], ranks: Sequence[int], name: str) -> DryTransport:
        """The group of the given world ranks."""
        del members, name
        return DryTransport(ranks.index(self.ranks[self.rank]), ranks)


class DryChannel(Progress):
    """A channel whose operations run as late as possible, in their order: when one of them is waited for.

    So what they use is held for as long as it ever may be.
    """

    def __init__(self, name: str, world: DryWorld, *, number: int = 0) -> None:
        super().__init__(name, number=number, is_threaded=False)
        self._world = world
        self._started: deque[tuple[Work, Callable[[], object]]] = deque()
        self._is_running = False

    def add_group(self, group: Group) -> None:
        """Do nothing: nobody asks for groups by their names."""

    def submit(
        self,
        group: Group,
        body: Callable[[], object],
        verb: str,
        buffers: object = None,
        label: Label = "",
        describe: Callable[[], str] | None = None,
        ready: Ready | None = None,
    ) -> Work:
        """Queue `body`. Local."""
        del group, label, describe, ready
        work = Work(verb, buffers, self._run_up_to)
        self._started.append((work, body))
        return work

    def drain(self) -> None:
        """Run everything, unless it asks for that itself."""
        if not self._is_running:
            self._run(lambda _: False)

    def _run_up_to(self, work: Work) -> None:
        self._run(lambda done: done is work)

    def _run(self, is_last: Callable[[Work], bool]) -> None:
        self._is_running, self._world.running = True, self.name
        try:
            while self._started:
                work, body = self._started.popleft()
                try:
                    with torch.no_grad():
                        body()
                except Exception as error:  # raised by whoever waits, as on a progress thread
                    work.finish(error)
                else:
                    work.finish()
                if is_last(work):
                    return
        finally:
            self._is_running, self._world.running = False, ""


class DryWorld(World):
    """The world of one rank of many, all on one node, in which nothing moves.

    Attributes:
        running: the channel whose operations run now, "" outside of them.
    """

    running = ""

    def __init__(self, rank: int, size: int) -> None:
        """Local."""
        comm = Comm(Group(DryTransport(rank, range(size)), range(size), ("world",), "ordered", CommTrace()))
        super().__init__(comm, comm.split(0, range(size), ("node",)), node_count=1)

    def new_channel(self, name: str) -> DryChannel:
        """A queue for started verbs."""
        channel = DryChannel(name, self, number=len(self._channels))
        self._channels.append(channel)
        return channel

    def alone(self, axes: tuple[str, ...], reduction: str, trace: CommTrace, progress: Progress | None = None) -> Comm:
        """A group of this rank alone."""
        ranks = (self.rank,)
        return Comm(Group(DryTransport(0, ranks), ranks, axes, reduction, trace), progress)
