"""Groups and ranks for user code, and the beginning and end of torch.distributed's default group.

A group is None for all ranks of the job, a `Comm`, or a process group of torch.distributed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpispeed.base.errors import CommError, UsageError
from mpispeed.base.slot_scope import refuse_rank
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import World, current
from mpispeed.process_group.group import BACKEND, MpiProcessGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("mpispeed.comm")

_OWN_BACKENDS = ("mpi", BACKEND)

_LEFT: list[Any] = []
"""After `destroy_process_group()`: the default group that torch had then, made by other code, or None."""


def is_available() -> bool:
    """True: a job without MPI is one of one rank."""
    return True


def is_initialized() -> bool:
    """True once this process has joined its world; false from `destroy_process_group()` to `init_distributed()`."""
    return current() is not None and not (_LEFT and _default_group() is _LEFT[0])


def destroy_process_group(group: Comm | ProcessGroup | None = None) -> None:
    """Finish and free a process group of torch.distributed; by default its default group and with it all others.

    The world stays until the process ends, because MPI can be joined only once: engines go on, verbs still work,
    and `init_distributed()` makes a new default group. Only `is_initialized()` is false until then. A default group
    that other code has made over another backend is left to that code. A `Comm` stays until the process ends.

    Collective over: `group`, or all ranks.
    """
    if group is not None and group is not _default_group():
        if not isinstance(group, Comm):
            group_of(group)
            dist.destroy_process_group(group)
            return
        if group is not current_world().comm:
            return
    if isinstance(_default_group(), MpiProcessGroup):
        dist.destroy_process_group()
    _LEFT[:] = [_default_group()]


def set_backend(backend: str | None = None) -> None:
    """Choose what carries verbs: always MPI; other names than "mpi" and "mpi4py" are named in a warning."""
    if backend is not None and str(backend).lower() not in _OWN_BACKENDS and current_world().rank == 0:
        log.warning("set_backend(%r) has no effect: ranks are connected by MPI; leave it out", backend)


def has_all_gather_into_tensor() -> bool:
    """True: `all_gather_into_tensor` is there."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: `reduce_scatter_tensor` is there."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: `all_reduce_coalesced` is there."""
    return True


def has_coalescing_manager() -> bool:
    """True: `all_gather_coalesced` is there."""
    return True


def get_world_group() -> Comm:
    """The group of all ranks."""
    return current_world().comm


def get_rank(group: Comm | ProcessGroup | None = None) -> int:
    """Position of this process in `group`, or its world rank.

    Raises:
        UsageError: a model whose bits may not depend on the ranks asks in its forward pass.
    """
    refuse_rank("mpispeed.comm.get_rank()")
    return group_of(group).rank


def get_world_size(group: Comm | ProcessGroup | None = None) -> int:
    """Number of ranks of `group`, or of the job."""
    return group_of(group).size


def get_local_rank() -> int:
    """Position among the ranks of this node. Raises as `get_rank`."""
    refuse_rank("mpispeed.comm.get_local_rank()")
    return current_world().local_rank


def get_global_rank(group: Comm | ProcessGroup | None = None, group_rank: int = 0) -> int:
    """World rank of a position in `group`.

    Raises:
        CommError: the group has no such position.
    """
    ranks = group_of(group).ranks
    if not 0 <= group_rank < len(ranks):
        msg = f"get_global_rank: group_rank={group_rank} is no position in a group of {len(ranks)} ranks"
        raise CommError(msg)
    return ranks[group_rank]


def get_all_ranks_from_group(group: Comm | ProcessGroup | None = None) -> list[int]:
    """World ranks of the members of `group`, in its order."""
    return list(group_of(group).ranks)


def new_group(ranks: Sequence[int]) -> Comm | None:
    """A group of some world ranks; None on ranks outside it.

    Collective over: all ranks of the job.
    """
    return current_world().group(ranks)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """A device mesh of torch.distributed over all ranks, whose groups are process groups over MPI.

    Collective over: all ranks of the job.

    Raises:
        UsageError: torch.distributed has no default group; `init_distributed` makes it.
    """
    from torch.distributed.device_mesh import init_device_mesh  # it costs much time to import

    if _default_group() is None:
        msg = "initialize_mesh_device: torch.distributed has no default group; call mpispeed.init_distributed() first"
        raise UsageError(msg)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


# -- for the other modules of `mpispeed.comm` ------------------------------------------------------------------


def current_world() -> World:
    """The world of this process.

    Raises:
        UsageError: it has not joined one.
    """
    world = current()
    if world is None:
        msg = "this process has not joined its world yet; call mpispeed.init_distributed() first"
        raise UsageError(msg)
    return world


def group_of(group: Any) -> Comm:
    """The `Comm` that carries the verbs of a group.

    Raises:
        CommError: it is a group over another backend, or none at all.
    """
    world = current_world()
    if group is None:
        return world.comm
    if isinstance(group, Comm):
        return group
    if isinstance(group, MpiProcessGroup):
        return group.comm
    if not isinstance(group, dist.ProcessGroup):
        msg = (
            f"group={group!r} of type {type(group).__name__} is no group that this rank belongs to; give None, a "
            "result of mpispeed.comm.new_group, or a process group of torch.distributed, on its members only"
        )
        raise CommError(msg)
    ranks = dist.get_process_group_ranks(group)
    if list(ranks) == list(range(world.size)):
        return world.comm
    msg = (
        f"a process group of ranks {ranks[:16]} over backend {dist.get_backend(group)!r}; groups have to be over MPI: "
        f"make it with mpispeed.comm.new_group(ranks) or torch.distributed.new_group(ranks, backend={BACKEND!r})"
    )
    raise CommError(msg)


def position(group: Any, rank: int) -> int:
    """Position of a world rank in a group.

    Raises:
        CommError: it is not a member.
    """
    ranks = group_of(group).ranks
    if rank not in ranks:
        msg = f"world rank {rank} is not in the group of ranks {list(ranks)[:16]}"
        raise CommError(msg)
    return ranks.index(rank)


def _default_group() -> Any:
    """The default group of torch.distributed, or None."""
    return dist.group.WORLD if dist.is_initialized() else None
