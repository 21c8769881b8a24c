"""torch.distributed as these tests use it: its default group is ours, and gloo stands beside it for comparison."""

import inspect
import os
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch.distributed as dist

import mpispeed.torch_backend  # noqa: F401 -- registers the backend

SECONDS = timedelta(seconds=20)


class Groups(NamedTuple):
    """The same ranks over MPI and over gloo; `ranks` in order: not sorted in the sub-group, unless by torch 2.8."""

    ranks: list[int]
    ours: dist.ProcessGroup
    gloo: dist.ProcessGroup

    @property
    def me(self):
        """Position of this rank, -1 where it is no member."""
        return self.ranks.index(dist.get_rank()) if dist.get_rank() in self.ranks else -1


@pytest.fixture(scope="session")
def torch_world(world):
    """The default group over MPI; its store is torch's own, so that gloo does not rest on ours."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    port = world.comm.share(store.port if store is not None else 0)
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("mpi4py", store=store, rank=world.rank, world_size=world.size, timeout=SECONDS)
    yield world
    dist.destroy_process_group()
    world.comm.barrier()  # the store ends with rank 0


@pytest.fixture(scope="session")
def both(torch_world):
    """Groups of all ranks and of some, over MPI and over gloo."""
    some = {1: [0], 2: [1, 0], 3: [2, 0], 4: [3, 0, 2]}[torch_world.size]
    found = {"world": Groups(list(range(torch_world.size)), dist.group.WORLD, dist.new_group(backend="gloo"))}
    in_order = {}
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        in_order["sort_ranks"] = False
    else:
        some.sort()  # as torch 2.8 does
    pair = [dist.new_group(some, backend=name, **in_order) for name in ("mpi4py", "gloo")]
    found["sub-group"] = Groups(some, *pair)
    # Torch names groups that are made by their members alone after the number of groups that a rank is in.
    rest = [rank for rank in range(torch_world.size) if rank not in some]
    for name in ("mpi4py", "gloo") if rest else ():
        dist.new_group(rest, backend=name)
    return found
