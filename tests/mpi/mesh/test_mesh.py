"""Meshes, channels and the world over MPI."""

import os
import threading

import pytest
import torch

from mpispeed.mesh import Mesh, Topology, current, start

pytestmark = pytest.mark.mpi(min_size=1)


def test_world_is_joined_once(world):
    assert start() is world
    assert current() is world


def test_world_facts(world):
    assert world.size == world.comm.size
    assert world.comm.gather_objects(world.rank) == list(range(world.size))
    assert world.node.gather_objects(world.local_rank) == list(range(world.local_size))
    assert 1 <= world.node_count <= world.size
    assert int(os.environ["RANK"]) == world.rank
    assert int(os.environ["WORLD_SIZE"]) == world.size
    assert int(os.environ["LOCAL_RANK"]) == world.local_rank


def shapes(size):
    """Axis sizes that multiply to `size`."""
    return [{"pipe": 1, "data": size, "model": 1}, {"pipe": size, "data": 1}] + (
        [{"pipe": 2, "data": size // 2}] if size % 2 == 0 else []
    )


def test_groups_are_those_of_the_topology(world):
    for axes in shapes(world.size):
        topology = Topology(axes)
        mesh = Mesh(topology, world)
        for wanted in ("pipe", "data", ("pipe", "data"), ()):
            comm = mesh[wanted]
            peers = list(topology.peers(world.rank, wanted))
            assert list(comm.ranks) == peers
            assert comm.gather_objects(world.rank) == peers
            assert comm.rank == mesh.index(wanted)
            x = torch.tensor([float(world.rank)])
            comm.all_reduce(x)
            assert x.item() == sum(peers)
        mesh.close()


@pytest.mark.mpi(min_size=2)
def test_lanes_run_independently(world):
    """One channel waits inside an operation until the other has done its own: a single queue would never end."""
    mesh = Mesh(Topology({"data": world.size}), world)
    gate = threading.Event()
    slow = mesh.channel("first")["data"].start(lambda _: gate.wait(20))
    fast = mesh.channel("second")["data"].start(lambda comm: (comm.barrier(), gate.set()))
    fast.wait(20)
    slow.wait(20)
    mesh.close()
    assert gate.is_set()


def test_lanes_need_no_common_order(world):
    mesh = Mesh(Topology({"data": world.size}), world)
    one, two = mesh.channel("one")["data"], mesh.channel("two")["data"]
    x, y = torch.ones(50_000), torch.full((50_000,), 2.0)
    starts = [lambda: one.start_all_reduce(x), lambda: two.start_all_reduce(y)]
    works = [begin() for begin in (starts if world.rank == 0 else reversed(starts))]
    for work in works:
        work.wait(30)
    assert x.eq(world.size).all()
    assert y.eq(2 * world.size).all()
    mesh.close()


def test_many_started_sums(world):
    mesh = Mesh(Topology({"data": world.size}), world)
    tensors = [torch.full((n * 97,), float(world.rank + n)) for n in range(1, 40)]
    works = [mesh["data"].start_all_reduce(t) for t in tensors]
    for n, (tensor, work) in enumerate(zip(tensors, works, strict=True), start=1):
        work.wait(30)
        assert tensor.eq(sum(rank + n for rank in range(world.size))).all()
    mesh.close()


def test_groups_of_some_ranks(world):
    group = world.group([world.size - 1])
    assert (group is None) == (world.rank != world.size - 1)
    everyone = world.group(range(world.size))
    assert everyone.gather_objects(world.rank) == list(range(world.size))


def test_node_group_shares_memory(world):
    x = torch.ones(100_000)
    world.node.all_reduce(x)
    assert x.eq(world.local_size).all()
