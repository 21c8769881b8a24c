"""The world of all ranks: joining MPI once per process, and this rank's place on its node."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from zlib import crc32

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.launched import RANK_PID, launched_rank
from mpispeed.base.log import keep_lines_whole
from mpispeed.mesh import exits, launcher
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.collectives.group import CommTrace, Group, Limits
from mpispeed.mesh.collectives.progress import Progress
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.ending import Ending
from mpispeed.mesh.recorder import CallSequence

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 1800.0

LAST_SECONDS = 10.0
"""How long an end waits for what was started on groups of members, and for messages: nobody may ever come to that."""

FIRST_OWN, OWN_COUNT = 1000, 60000
"""Numbers of channels of groups of members: above those that all ranks have, below the 2^16 of the recorder."""

_PROCESS: dict[str, World] = {}
"""The world of this process under "world"; MPI can be joined only once, so there is only one."""


GridCoords = Callable[[Sequence[int]], tuple[int, ...] | None]


class World:
    """All ranks, in `comm`, and those that share this rank's node, in `node`.

    Attributes:
        rank: world rank of this process.
        size: number of ranks.
        local_rank: position among the ranks of this node.
        local_size: number of ranks on this node.
        comm_trace: the trace of all groups of this process.
    """

    def __init__(
        self,
        comm: Comm,
        node: Comm,
        *,
        node_count: int,
        has_threads: bool = True,
        ending: Ending | None = None,
        grid_coords: GridCoords = lambda _: None,
    ) -> None:
        """Give started verbs a progress thread. Collective over: all ranks.

        `grid_coords` tells this rank's place on the library's own Cartesian grid of given sizes, if it has one.
        """
        self.node_count, self.has_threads = node_count, has_threads
        self.ending, self.grid_coords = ending or Ending(), grid_coords
        self._channels: list[Progress] = []
        # Of groups of members, which other ranks do not know: their channels, by the group's id, which stays its own.
        self._own: dict[int, tuple[Comm, Progress]] = {}
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        progress = self.new_channel("world")
        self.comm, self.node = (group.starting_on(progress) if group.size > 1 else group for group in (comm, node))
        self.rank, self.size, self.comm_trace = comm.rank, comm.size, comm.comm_trace
        self.local_rank, self.local_size = node.rank, node.size

    @property
    def channels(self) -> Sequence[Progress]:
        """All channels of this world and its meshes, in the same order on every rank."""
        return self._channels

    def new_channel(self, name: str) -> Progress:
        """A queue for started verbs that `close` will end."""
        taken = {channel.number for channel in self._channels}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        channel = Progress(name, number=number, is_threaded=self.has_threads)
        self._channels.append(channel)
        return channel

    def close_channel(self, channel: Progress) -> None:
        """End a channel and give its number free. Collective over: all ranks, whose numbers have to stay equal."""
        channel.close()
        if channel in self._channels:
            self._channels.remove(channel)

    def alone(self, axes: tuple[str, ...], reduction: str, trace: CommTrace, progress: Progress | None = None) -> Comm:
        """A group of this rank alone. Local."""
        return solo_comm(self.rank, axes, reduction, trace, progress)

    def group(self, ranks: Sequence[int]) -> Comm | None:
        """A group of some world ranks; None on ranks that are not in it.

        Collective over: all ranks, with equal `ranks`.
        """
        is_member = self.rank in ranks
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            msg = f"a group of ranks {list(ranks)} needs different ranks out of 0..{self.size - 1}"
            raise ConfigError(msg)
        if self.size == 1:
            return self.alone(("group",), self.comm.reduction, self.comm_trace)
        members = sorted(ranks) if is_member else [r for r in range(self.size) if r not in ranks]
        made = self.comm.split(0 if is_member else 1, members, ("group",))
        if made.size > 1:
            made = made.starting_on(self._channels[0])
        return made if is_member else None

    def group_of_members(self, ranks: Sequence[int], name: str, reduction: str = "") -> Comm:
        """A group of some world ranks, in the given order, with traffic and a channel of its own.

        The channel is ended by `close_group`, or with the world. `name` is the same on all members; `reduction` is
        that of the world by default.

        Collective over: `ranks` only.
        """
        # Torch names its default group alike each time; the watch must not take the calls of one for those of another.
        times = self._made[name, tuple(ranks)]
        self._made[name, tuple(ranks)] = times + 1
        name = f"{name} made again {times}" if times else name
        made = self.comm.of_members(ranks, name, ("torch",), reduction=reduction)
        channel = Progress(name, number=_own_number(name), is_threaded=self.has_threads)
        if made.size > 1:
            made = made.starting_on(channel)
        self._own[id(made)] = made, channel
        return made

    def close_group(self, group: Comm) -> None:
        """End the channel of a group of `group_of_members`, then free it. Collective over: the group."""
        _, channel = self._own.pop(id(group), (None, None))
        if channel is not None:
            channel.close(LAST_SECONDS)
            group.close()

    def forget_group(self, group: Comm) -> None:
        """Let go of a group of `group_of_members`: what was started on it fails. Not blocking, and not collective."""
        _, channel = self._own.pop(id(group), (None, None))
        if channel is not None:
            channel.abandon()

    def close(self) -> None:
        """Finish started operations and end the progress threads; messages that nobody answers are given up."""
        end = time.monotonic() + LAST_SECONDS
        for _, channel in self._own.values():
            channel.close(max(0.0, end - time.monotonic()))
        self._own.clear()
        count = sum(channel.forget_messages(max(0.0, end - time.monotonic())) for channel in self._channels)
        if count:
            log.warning(
                "rank %d ends with %d started messages that no other rank has answered within %g s",
                self.rank, count, LAST_SECONDS,
            )  # fmt: skip
        for channel in self._channels:
            channel.close()


def _own_number(name: str) -> int:
    """A number that is equal on all members of a group, though they count their groups differently."""
    return FIRST_OWN + crc32(name.encode()) % OWN_COUNT


def is_started() -> bool:
    """True if this process has joined MPI by `start`."""
    return "world" in _PROCESS


def start(reduction: str = "mpi", *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> World:
    """Join MPI, or make a world of one where there is none; later calls return the same world.

    Exports RANK, WORLD_SIZE and LOCAL_RANK, divides the cores among the ranks of a node unless OMP_NUM_THREADS is
    set, and makes an uncaught error on one rank end the whole job.

    Args:
        reduction: "mpi" or "ordered", for the world's own verbs; a Mesh chooses for itself.
        timeout: seconds a started verb waits for its peers.

    Collective over: all ranks of the job, at the first call.

    Raises:
        ConfigError: launcher and MPI library do not belong together.
    """
    if "world" in _PROCESS:
        return _PROCESS["world"]
    launcher.prepare()
    launcher.warn_early()
    try:
        launcher.check_torchrun()
        world = _join(reduction, timeout)
    except ConfigError:
        # Every process stands alone here, so only the launcher's numbering tells which one may speak.
        alone = solo_comm()
        exits.install(alone, alone, Ending(), is_silent=launched_rank() != 0)
        raise
    _PROCESS["world"] = world
    if world.size > 1:
        keep_lines_whole()
    _export(world)
    _share_cores(world)
    exits.install(world.comm, world.node, world.ending, world.close)
    return world


@contextmanager
def standing_in(world: World) -> Iterator[None]:
    """Context in which `start` returns `world`, as for a model that is built to predict what a rank would hold."""
    before = dict(_PROCESS)
    _PROCESS["world"] = world
    try:
        yield
    finally:
        _PROCESS.clear()
        _PROCESS.update(before)


def current() -> World | None:
    """The world of this process, if it was started."""
    return _PROCESS.get("world")


def library() -> str:
    """The first line that the MPI library says of its version; "" where this process has none."""
    mpi = sys.modules.get("mpi4py.MPI")
    return "" if mpi is None else " ".join(mpi.Get_library_version().split("\n")[0].strip(" \0").split())


def _join(reduction: str, timeout_seconds: float) -> World:
    try:
        # Imported here because the import joins MPI, and because there may be no MPI at all.
        with warnings.catch_warnings():
            # The launcher's variables are checked below, with errors that name the command to use.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
            from mpi4py import MPI

        from mpispeed.mesh.backends.mpi import MpiTransport, ending, grid_coords
    except (ImportError, RuntimeError, OSError) as error:
        launcher.check_alone(error)
        return World(solo_comm(0, ("world",), reduction), solo_comm(0, ("node",), reduction), node_count=1)
    launcher.check(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    handle = MPI.COMM_WORLD.Dup()
    node_handle = handle.Split_type(MPI.COMM_TYPE_SHARED, handle.Get_rank())
    node_ranks = node_handle.allgather(handle.Get_rank())
    node_count = handle.allreduce(int(node_handle.Get_rank() == 0))
    near = frozenset(node_ranks)
    comm_trace = CommTrace()

    def group(handle: MPI.Comm, ranks: Sequence[int], name: str) -> Comm:
        limits, sequence = Limits(timeout_seconds=timeout_seconds), CallSequence.root(name, ranks)
        transport = MpiTransport(handle, ranks, near)
        return Comm(Group(transport, ranks, (name,), reduction, comm_trace, limits=limits, sequence=sequence))

    has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    return World(
        group(handle, range(handle.Get_size()), "world"),
        group(node_handle, node_ranks, "node"),
        node_count=node_count,
        has_threads=has_threads,
        ending=ending(),
        grid_coords=partial(grid_coords, handle),
    )


def _export(world: World) -> None:
    """Set the variables DeepSpeed scripts read, and our own. Collective over: all ranks."""
    os.environ[RANK_PID] = str(os.getpid())
    facts = {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank)}
    stale = {name: os.environ[name] for name, value in facts.items() if os.environ.get(name, value) != value}
    os.environ.update(facts)
    found = world.comm.transport.library_gather_objects(stale)
    wrong = [rank for rank, settings in enumerate(found) if settings]
    if wrong and world.rank == 0:
        text = " ".join(f"{name}={value!r}" for name, value in found[wrong[0]].items())
        log.warning(
            "the environment of %d of %d ranks had other values than MPI (rank %d: %s), left by another launcher "
            "perhaps; MPI's are used", len(wrong), world.size, wrong[0], text,
        )  # fmt: skip


def _share_cores(world: World) -> None:
    """Give torch the cores of this rank divided by the ranks of the node that may run on them."""
    own = launcher.cores()
    others = world.node.transport.library_gather_objects(own)
    sharing = sum(not own.isdisjoint(other) for other in others)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(own) // sharing))
