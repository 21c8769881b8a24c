"""The common part of process groups: identity, end, and verbs carried out now or in their turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpispeed.base import device as devices
from mpispeed.base.errors import CommError
from mpispeed.mesh.comm import Comm, carry
from mpispeed.mesh.world import World
from mpispeed.process_group.options import Options
from mpispeed.process_group.torch_work import TorchWork

Tensors = Sequence[torch.Tensor]

_Base: Any = dist.ProcessGroup
"""Untyped: the stubs of torch list all C++ overloads, of which torch calls one from Python."""


class Carrier(_Base):
    """A process group without its verbs, and the way in which it carries them out."""

    def __init__(self, world: World, comm: Comm, store: dist.Store, options: Options) -> None:
        super().__init__(comm.rank, comm.size)
        self.options = options
        self._world, self._comm, self._store, self._is_open = world, comm, store, True
        self._name, self._desc = "", ""

    @property
    def comm(self) -> Comm:
        """The group that carries the verbs.

        Raises:
            CommError: this process group has been destroyed.
        """
        if not self._is_open:
            msg = f"the process group {self._name or self._desc!r} was destroyed; make a new one"
            raise CommError(msg)
        return self._comm

    # -- identity; torch looks for some of these names from C++ ------------------------------------------------

    @property
    def group_name(self) -> str:
        """Name by which torch finds this group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description that torch has set."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        """As `group_name`."""
        return self._name

    def getRank(self) -> int:
        """Position of this rank."""
        return self._comm.rank

    def getSize(self) -> int:
        """Number of ranks."""
        return self._comm.size

    rank, size = getRank, getSize

    def get_group_store(self) -> dist.Store:
        """The store that this group was made with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let started operations wait so long for other ranks."""
        for comm in (self.comm, self.comm.started):
            comm.group.limits.timeout_seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Finish what was started, then free the group. Collective over: this group."""
        if self._is_open:
            self._is_open = False
            self._world.close_group(self._comm)

    def abort(self) -> None:
        """Let go of the group without waiting for other ranks; what was started on it fails."""
        if self._is_open:
            self._is_open = False
            self._world.forget_group(self._comm)

    def run(self, verb: str, opts: Any, outputs: Tensors, body: Callable[[Comm], object], label: str = "") -> TorchWork:
        """Carry `body` out, now or in its turn. Collective over: this group."""
        notice(outputs)
        if getattr(opts, "asyncOp", True):
            return TorchWork(outputs, self.comm.start(body, verb, outputs, label))
        # In the same turn as others: a call of one rank may meet an asynchronous one of another, as in torch's Join.
        done = TorchWork(outputs, carry(self.comm, body, verb, outputs, label))
        done.wait()
        return done


def notice(tensors: Tensors) -> None:
    """Note the device of tensors before anything is started with them, which then keeps to the order of its streams."""
    for x in tensors:
        if devices.is_on_device(x):
            devices.notice(x.device)


def one(tensors: Tensors | torch.Tensor) -> torch.Tensor:
    """The only tensor of a list, or the tensor that was given in its place; its device is noted."""
    if isinstance(tensors, torch.Tensor):
        notice([tensors])
        return tensors
    notice(tensors)
    if len(tensors) != 1:
        msg = f"{len(tensors)} tensors in one call of a process group; a rank has one device, so give one"
        raise CommError(msg)
    return tensors[0]


def root_of(opts: Any) -> int:
    """The root in the options of a call, or given in their place."""
    return int(getattr(opts, "rootRank", opts or 0))
