"""A topology on real ranks: one group per set of axes, and channels of duplicated groups."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from mpispeed.base import device as devices
from mpispeed.base.errors import TopologyError
from mpispeed.mesh.backends.solo import SoloComm
from mpispeed.mesh.topology import Axes, Topology
from mpispeed.mesh.trace.comm_trace import CommTrace

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.progress import Progress
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.world import World

Key = tuple[str, ...]


class Mesh:
    """Named axes over all ranks.

    `mesh["data"]` and `mesh["data", "model"]` are groups over these axes; axes of size 1 and `mesh[()]`
    give a group of this rank alone. The order in which axes are named does not matter.
    """

    def __init__(self, topology: Topology, world: World, *, reduction: str | None = None) -> None:
        """Make a group for every set of axes larger than 1, and a duplicate of each for started verbs.

        Collective over: all ranks.

        Raises:
            TopologyError: the axes do not multiply to the number of ranks.
        """
        if topology.size != world.size:
            msg = (
                f"the axes {topology} make {topology.size} ranks, but the job has {world.size}; start "
                f"{topology.size} ranks or change the axis sizes"
            )
            raise TopologyError(msg)
        self.topology, self.world = topology, world
        self.comm_trace = CommTrace(world.comm_trace)
        self.reduction = reduction or world.comm.reduction
        self._coords = topology.coords(world.rank)
        self._channels: dict[str, Mesh] = {}
        self._progress: Progress | None = None
        self._solos: dict[Key, Comm] = {}
        self._check_grid()
        names = [n for n, size in zip(topology.names, topology.sizes, strict=True) if size > 1]
        subsets = [axes for count in range(1, len(names) + 1) for axes in combinations(names, count)]
        self._comms: dict[Key, Comm] = {axes: self._make(axes) for axes in subsets}
        if subsets:
            progress = world.new_channel("mesh")
            for axes in subsets:
                self._comms[axes].start_on(progress)

    @property
    def rank(self) -> int:
        """World rank of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def node(self) -> Comm:
        """The ranks that share this rank's node."""
        return self.world.node

    def __getitem__(self, axes: Axes) -> Comm:
        """The group over `axes` that this rank belongs to. Not collective: groups were made before."""
        chosen = self.topology.resolve(axes)
        key = tuple(name for name in chosen if self.topology.group_size(name) > 1)
        if key:
            return self._comms[key]
        if chosen not in self._solos:
            solo = self._solos[chosen] = SoloComm(self.rank, self._spoken(chosen), self.reduction, self.comm_trace)
            if self._progress is not None and devices.used() is not None:
                solo.run_on(self._progress)  # copies between host and device run beside what is computed
        return self._solos[chosen]

    def index(self, axes: Axes) -> int:
        """Position of this rank in its group over `axes`."""
        return self.topology.index(self.rank, axes)

    def channel(self, name: str) -> Mesh:
        """The same axes on duplicated groups with a progress thread of their own.

        All verbs of a channel, started or blocking, run in the order of their calls, and independently of
        other channels.

        Collective over: all ranks, the first time a name is used.
        """
        if self._progress is not None:
            msg = "a channel has no channels of its own; ask the mesh it was made of"
            raise TopologyError(msg)
        if name not in self._channels:
            self._channels[name] = self._duplicate(name)
        return self._channels[name]

    def close(self) -> None:
        """Finish what was started and give all groups back. Collective over: all ranks."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if self._progress is not None:
            self._progress.close()
        for comm in self._comms.values():
            if self._progress is None:
                if comm.progress is not None:
                    comm.progress.close()
                comm.started.close()
            comm.close()
        self._comms.clear()

    def _duplicate(self, name: str) -> Mesh:
        channel = object.__new__(Mesh)
        channel.topology, channel.world, channel.comm_trace, channel.reduction = (
            self.topology,
            self.world,
            self.comm_trace,
            self.reduction,
        )
        channel._coords, channel._channels, channel._solos = self._coords, {}, {}
        channel._progress = self.world.new_channel(name)
        channel._comms = {axes: comm.duplicate().run_on(channel._progress) for axes, comm in self._comms.items()}
        return channel

    def _make(self, axes: Key) -> Comm:
        fixed = {name: at for name, at in self._coords.items() if name not in axes}
        color = self.topology.rank(**fixed, **dict.fromkeys(axes, 0))
        comm = self.world.comm.split(color, self.topology.peers(self.rank, axes), self._spoken(axes))
        comm.reduction, comm.comm_trace = self.reduction, self.comm_trace
        return comm

    def _spoken(self, axes: Key) -> Key:
        """The alias that means exactly these axes, if there is one, so that the trace shows names that users know."""
        for alias, parts in self.topology.aliases:
            if axes and tuple(p for p in parts if self.topology.group_size(p) > 1) == axes:
                return (alias,)
        return axes

    def _check_grid(self) -> None:
        coords = self.world.grid_coords(self.topology.sizes) if self.topology.sizes else None
        own = tuple(self._coords.values())
        if coords is not None and coords != own:
            msg = f"rank {self.rank} is at {own} by arithmetic and at {coords} on the MPI grid of {self.topology}"
            raise TopologyError(msg)
