"""Choice of the way for tensors of a device between ranks: candidates are tried, rank 0's times decide for all.

There is one choice for groups inside of a node and one for those over nodes. Where a way cannot be opened, all ranks of
the group stage in host memory instead, and one line says why.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import CommError, ConfigError
from mpispeed.base.units import format_bytes
from mpispeed.mesh.backends import nccl
from mpispeed.mesh.backends.mapped import open_mapped
from mpispeed.mesh.backends.pointers import PointerPath
from mpispeed.mesh.collectives.group import CommTrace

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.device_path import DevicePath
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.world import World

log = logging.getLogger(__name__)

VARIABLE = "MPISPEED_DEVICE_PATH"
"""Environment variable that names the way instead of a measurement; the same on all ranks."""

STAGED = "staged"
SIZES = (256 << 10, 32 << 20)
"""Bytes that all ranks together gather: about what a layer norm has, and what a layer has."""

TRIALS = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: seconds of a gather of each of `SIZES` on rank 0, or the reason why there are none."""

    name: str
    where: str
    seconds: tuple[float, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} {self.where}: {self.problem}"
        shown = ", ".join(f"{format_bytes(n)} {s * 1e3:.3g} ms" for n, s in zip(SIZES, self.seconds, strict=True))
        return f"{self.name} {self.where}: gathers of {shown}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The ways chosen, equal on all ranks.

    Attributes:
        in_node: of groups whose ranks are on one node.
        between_nodes: of other groups.
        figures: what the choice was made from; empty where the variable named it, or there was nothing to choose.
        is_given: the variable named it.
    """

    in_node: str = STAGED
    between_nodes: str = STAGED
    figures: tuple[Trial, ...] = ()
    is_given: bool = False

    def of(self, comm: Comm) -> str:
        """The way of a group."""
        return self.in_node if comm.transport.shares_memory else self.between_nodes

    def describe(self) -> str:
        """The ways, and what they were chosen from."""
        return "; ".join([str(self), *map(str, self.figures)])

    def __str__(self) -> str:
        source = f"by {VARIABLE}" if self.is_given else "measured" if self.figures else "nothing to choose from"
        apart = "" if self.in_node == self.between_nodes else f", {self.between_nodes} over nodes"
        return f"{self.in_node}{apart} ({source})"


Opener = Callable[["Comm", torch.device, "Place"], "DevicePath"]


@dataclass(frozen=True, slots=True)
class Place:
    """Facts of a group for what opens its way: the name of this rank's node, and whether neighbours send messages."""

    node: str = ""
    has_messages: bool = False


def _open_nccl(comm: Comm, device: torch.device, place: Place) -> DevicePath:
    return nccl.open_path(comm, device, node=place.node, has_messages=place.has_messages)


def _open_mapped(comm: Comm, device: torch.device, place: Place) -> DevicePath:
    del place
    return open_mapped(comm.group, device)


def _open_pointers(comm: Comm, device: torch.device, place: Place) -> DevicePath:
    del place
    return PointerPath(comm.group, device)


OPENERS: dict[str, Opener] = {"mapped": _open_mapped, "nccl": _open_nccl, "pointers": _open_pointers}
"""By name: opens the way of a group, or raises a CommError on all of its ranks. Collective over: the group."""

ASKED_ONLY = frozenset({"pointers"})
"""Ways that are not tried unless the variable names them: where they do not work, the process may end."""

NOTHING = Choice()
"""Of a job that has nothing to choose from: one rank, or the host."""

_MEASURED: dict[str, Choice] = {}
"""Choices of this process, by kind of device; a machine is measured once."""


def asked() -> str:
    """What the variable names; "" if it is not set.

    Raises:
        ConfigError: it is none of the ways.
    """
    name = os.environ.get(VARIABLE, "")
    if name and name != STAGED and name not in OPENERS:
        msg = f"{VARIABLE} is {name!r}; it can be {', '.join([STAGED, *OPENERS])}, or be unset, and then it is measured"
        raise ConfigError(msg)
    return name


def choose(world: World, device: torch.device) -> Choice:
    """The ways for tensors of `device`.

    Collective over: all ranks.

    Raises:
        ConfigError: on all ranks: the variable is wrong, or differs between ranks.
    """
    if world.size == 1 or not devices.is_on_device(torch.empty(0, device=device)):
        return NOTHING
    with world.comm.together(ConfigError):
        own = asked()
    found = world.comm.gather_objects(own)
    other = next((rank for rank, name in enumerate(found) if name != found[0]), None)
    world.comm.agree(
        other is None,
        f"{VARIABLE} is {found[0]!r} on rank 0 and {found[other or 0]!r} on rank {other}; set it on all ranks alike",
        ConfigError,
    )
    if own:
        # Memory is mapped between processes of one node only.
        return Choice(own, STAGED if own == "mapped" else own, is_given=True)
    if device.type not in _MEASURED:
        _MEASURED[device.type] = _measure(world, device)
    return _MEASURED[device.type]


def _measure(world: World, device: torch.device) -> Choice:
    """Try all candidates inside of nodes and over nodes. Collective over: all ranks."""
    chosen, figures = {"in node": STAGED, "between nodes": STAGED}, list[Trial]()
    for where, comm in (("in node", world.node), ("between nodes", world.comm)):
        if world.comm.share(comm.size > 1 and (where == "in node" or world.node_count > 1)):
            trials = world.comm.share(_try_all(world, comm, device, where))
            figures += trials
            chosen[where] = _fastest(trials)
    over_nodes = chosen["in node" if world.node_count == 1 else "between nodes"]
    return Choice(chosen["in node"], over_nodes, tuple(figures))


def _try_all(world: World, comm: Comm, device: torch.device, where: str) -> list[Trial]:
    """Times of all ways over a group of its own; staged last, and only if there is another. Collective over: `comm`."""
    trials = list[Trial]()
    if comm.size == 1:  # a node with one rank, while others have more
        return trials
    probe = comm.split(0, comm.ranks, ("device path",), comm_trace=CommTrace())
    for name, opener in OPENERS.items():
        if name in ASKED_ONLY or (name == "mapped" and not probe.transport.shares_memory):
            continue
        try:
            path = probe.group.device_path = opener(probe, device, _place(world))
        except CommError as error:
            trials.append(Trial(name, where, problem=str(error)))
            continue
        trials.append(Trial(name, where, _times(probe, device)))
        probe.group.device_path = None
        path.close()
    if any(trial.seconds for trial in trials):
        trials.append(Trial(STAGED, where, _times(probe, device)))
    probe.close()
    return trials


def _times(comm: Comm, device: torch.device) -> tuple[float, ...]:
    """Seconds of a gather of each of `SIZES`, the median of some after a first. Collective over: `comm`."""
    found = []
    for nbytes in SIZES:
        shard = torch.zeros(nbytes // comm.size, dtype=torch.uint8, device=device)
        out = torch.empty(shard.numel() * comm.size, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(1 + TRIALS):
            devices.mark(device).synchronize()
            comm.barrier()
            begin = time.perf_counter()
            comm.all_gather(out, shard)
            devices.mark(device).synchronize()
            seconds.append(time.perf_counter() - begin)
        found.append(statistics.median(seconds[1:]))
    return tuple(found)


def _fastest(trials: Sequence[Trial]) -> str:
    """The way whose times, each in units of the best one of its size, are the least in sum."""
    timed = [trial for trial in trials if trial.seconds]
    if not timed:
        return STAGED
    best = [min(column) for column in zip(*(trial.seconds for trial in timed), strict=True)]
    return min(timed, key=lambda t: sum(s / b for s, b in zip(t.seconds, best, strict=True))).name


def _place(world: World, *, has_messages: bool = False) -> Place:
    return Place(f"the node of rank {world.node.ranks[0]}", has_messages)


# -- opening -------------------------------------------------------------------------------------------------------


def open_paths(comms: Iterable[Comm], device: torch.device, choice: Choice, place: Place) -> str:
    """Open the way of each group and of its started verbs; returns why one could not be, "" if all could.

    Groups that are made of these later, of all or some of their ranks, get theirs when they are made.

    Collective over: the ranks of each group, in the same order.
    """
    problem = ""
    for comm in comms:
        for part in (comm, comm.started):
            part.group.find_path = partial(_find_path, device=device, choice=choice, place=place)
        name = choice.of(comm)
        if comm.size == 1 or name == STAGED or _is_open(comm, name, device):
            continue
        parts = [comm] if comm.started is comm else [comm, comm.started]
        opened = []
        for part in parts:
            try:
                opened.append(OPENERS[name](part, device, place))
            except CommError as error:
                problem = problem or f"tensors of {device.type} are staged in host memory over {comm}: {error}"
                break
        if len(opened) < len(parts):
            for path in opened:
                path.close()
            continue
        for part, path in zip(parts, opened, strict=True):
            part.group.device_path = path
    return problem


def _find_path(made: Comm, *, device: torch.device, choice: Choice, place: Place) -> None:
    """Open the way of a group that was made of one that has been through `open_paths`. Collective over: the group."""
    problem = open_paths([made], device, choice, place)
    if problem and made.rank == 0:
        log.warning("%s", problem)


def _is_open(comm: Comm, name: str, device: torch.device) -> bool:
    """True if the way is open already, as of the groups of a model that was given to an engine before."""
    path = comm.group.device_path
    return path is not None and path.device == device and path.name in (name, "rccl" if name == "nccl" else name)


def connect(mesh: Mesh, device: torch.device, choice: Choice, *, messages: Sequence[str] = ()) -> None:
    """Open the ways of all groups of a mesh, also of those of channels that are made later.

    Args:
        mesh: the groups.
        device: of this rank.
        choice: what `choose` has found.
        messages: axes along which neighbours send messages; the mesh need not have them.

    Collective over: all ranks.
    """
    if choice.in_node != STAGED or choice.between_nodes != STAGED:
        mesh.prepare = lambda made: _connect(made, device, choice, messages)
        mesh.prepare(mesh)


def _connect(mesh: Mesh, device: torch.device, choice: Choice, messages: Sequence[str]) -> None:
    """Open the ways of one mesh or channel. Collective over: all ranks."""
    along = {name for axis in messages if mesh.topology.has(axis) for name in mesh.topology.resolve(axis)}
    plain, problem = _place(mesh.world), ""
    for axes, comm in mesh.groups():
        place = dataclasses.replace(plain, has_messages=set(axes) <= along)
        problem = open_paths([comm], device, choice, place) or problem
    texts = [text for text in mesh.world.comm.gather_objects(problem) if text]
    if texts and mesh.rank == 0:
        log.warning("%s", texts[0])
