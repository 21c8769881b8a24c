"""All ranks of the job: joining MPI once per process, and what a rank knows about its node."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.mesh import exits, launcher
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.ending import Ending
from mpispeed.mesh.journal import Journal
from mpispeed.mesh.progress import Progress
from mpispeed.mesh.solo import SoloComm

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 1800.0
DEFAULT_MASTER_PORT = 29500

_PROCESS: dict[str, World] = {}
"""The world of this process under "world"; MPI can be joined only once, so there is only one."""


class World:
    """All ranks, in `comm`, and those that share this rank's node, in `node`."""

    def __init__(
        self,
        comm: Comm,
        node: Comm,
        *,
        node_count: int,
        has_threads: bool = True,
        ending: Ending | None = None,
    ) -> None:
        """Wire started verbs to a progress thread. Collective over: all ranks."""
        self.comm, self.node, self.node_count = comm, node, node_count
        self.has_threads, self.ending = has_threads, ending or Ending()
        self._lanes: list[Progress] = []
        progress = self.new_lane("world")
        for group in (comm, node):
            if group.size > 1:
                group.start_on(progress)

    @property
    def rank(self) -> int:
        """World rank of this process."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    @property
    def local_rank(self) -> int:
        """Position among the ranks of this node."""
        return self.node.rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self.node.size

    @property
    def journal(self) -> Journal:
        """What all groups of this process have communicated."""
        return self.comm.journal

    @property
    def lanes(self) -> Sequence[Progress]:
        """All lanes of this world and its meshes, in the same order on every rank."""
        return self._lanes

    def new_lane(self, name: str) -> Progress:
        """A queue for started verbs that `close` will end."""
        lane = Progress(name, number=len(self._lanes), is_threaded=self.has_threads)
        self._lanes.append(lane)
        return lane

    def group(self, ranks: Sequence[int]) -> Comm | None:
        """A group of some world ranks; None on ranks that are not in it.

        Collective over: all ranks, with equal `ranks`.
        """
        is_member = self.rank in ranks
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            msg = f"a group of ranks {list(ranks)} needs different ranks out of 0..{self.size - 1}"
            raise ConfigError(msg)
        if self.size == 1:
            return SoloComm(self.rank, ("group",), self.comm.reduction, self.journal)
        members = sorted(ranks) if is_member else [r for r in range(self.size) if r not in ranks]
        made = self.comm.split(0 if is_member else 1, members, ("group",))
        if made.size > 1:
            made.start_on(self._lanes[0])
        return made if is_member else None

    def close(self) -> None:
        """Finish what was started and end the progress threads."""
        for lane in self._lanes:
            lane.close()


def start(
    reduction: str = "mpi",
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    master_port: int = DEFAULT_MASTER_PORT,
) -> World:
    """Join MPI, or make a world of one where there is none; later calls return the same world.

    Exports RANK, WORLD_SIZE and LOCAL_RANK, and MASTER_ADDR and MASTER_PORT where they are not set, divides
    the cores among the ranks of a node unless OMP_NUM_THREADS is set, and makes an uncaught error on
    one rank end the whole job.

    Args:
        reduction: "mpi" or "ordered", for the world's own verbs; a Mesh chooses for itself.
        timeout: seconds a started verb waits for its peers.
        master_port: exported for libraries that want one.

    Collective over: all ranks of the job, at the first call.

    Raises:
        ConfigError: launcher and MPI library do not belong together.
    """
    if "world" in _PROCESS:
        return _PROCESS["world"]
    launcher.prepare()
    launcher.warn_early()
    try:
        world = _join(reduction, timeout)
    except ConfigError:
        # Every process stands alone here, so only the launcher's numbering tells which one may speak.
        alone = SoloComm()
        exits.install(alone, alone, Ending(), is_silent=launcher.launched_rank() != 0)
        raise
    _PROCESS["world"] = world
    _export(world, master_port)
    _share_cores(world)
    exits.install(world.comm, world.node, world.ending, world.close)
    return world


def current() -> World | None:
    """The world of this process, if it was started."""
    return _PROCESS.get("world")


def _join(reduction: str, timeout_seconds: float) -> World:
    try:
        # Imported here because the import joins MPI, and because there may be no MPI at all.
        from mpi4py import MPI

        from mpispeed.mesh.mpi import MpiComm, ending
    except (ImportError, RuntimeError, OSError) as error:
        launcher.check_alone(error)
        return World(SoloComm(0, ("world",), reduction), SoloComm(0, ("node",), reduction), node_count=1)
    launcher.check(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    handle = MPI.COMM_WORLD.Dup()
    node_handle = handle.Split_type(MPI.COMM_TYPE_SHARED, handle.Get_rank())
    node_ranks = node_handle.allgather(handle.Get_rank())
    node_count = handle.allreduce(int(node_handle.Get_rank() == 0))
    near = frozenset(node_ranks)
    journal = Journal()
    comm = MpiComm(handle, range(handle.Get_size()), ("world",), reduction, journal, near)
    node = MpiComm(node_handle, node_ranks, ("node",), reduction, journal, near)
    comm.timeout_seconds = node.timeout_seconds = timeout_seconds
    has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    return World(comm, node, node_count=node_count, has_threads=has_threads, ending=ending())


def _export(world: World, master_port: int) -> None:
    """Set the variables DeepSpeed scripts read. Collective over: all ranks."""
    host = "127.0.0.1" if world.node_count == 1 else socket.gethostname()
    facts = {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank)}
    stale = {name: os.environ[name] for name, value in facts.items() if os.environ.get(name, value) != value}
    os.environ.update(facts)
    found = world.comm.library_gather_objects(stale)
    wrong = [rank for rank, settings in enumerate(found) if settings]
    if wrong and world.rank == 0:
        text = " ".join(f"{name}={value!r}" for name, value in found[wrong[0]].items())
        log.warning(
            "the environment of %d of %d ranks had other values than MPI (rank %d: %s), left by another launcher "
            "perhaps; MPI's are used", len(wrong), world.size, wrong[0], text,
        )  # fmt: skip
    os.environ.setdefault("MASTER_ADDR", world.comm.library_share(host, 0))
    os.environ.setdefault("MASTER_PORT", str(master_port))


def _share_cores(world: World) -> None:
    """Give torch the cores of this rank divided by the ranks of the node that may run on them."""
    own = launcher.cores()
    others = world.node.library_gather_objects(own)
    sharing = sum(not own.isdisjoint(other) for other in others)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(own) // sharing))
