"""Meshes on simulated ranks: groups by axes, channels, what is refused."""

import threading

import pytest
import torch

from mpispeed.base.errors import CommError, ConfigError, TopologyError
from mpispeed.mesh import Factor, Mesh, Topology, World, sim
from tests.helpers import verbs


def test_groups_by_axes():
    def fn(world):
        mesh = Mesh(Topology({"pipe": 2, "data": 3, "model": 1}), world)
        x = torch.tensor([float(world.rank)])
        mesh["data"].all_reduce(x)
        y = torch.tensor([float(world.rank)])
        mesh["data", "pipe"].all_reduce(y)
        alone = torch.tensor([7.0])
        mesh["model"].all_reduce(alone)
        mesh[()].all_reduce(alone)
        facts = (
            x.item(),
            y.item(),
            alone.item(),
            list(mesh["data"].ranks),
            mesh["data"].axes,
            mesh["pipe", "model"].size,
            mesh.index("data"),
            mesh["model"].size,
            mesh["model"].axes,
            list(mesh[()].ranks),
            mesh["pipe", "data"] is mesh["data", "pipe"],
        )
        mesh.close()
        return facts

    for rank, facts in enumerate(sim.run(6, fn)):
        row = rank // 3
        assert facts == (
            sum(range(row * 3, row * 3 + 3)),
            15.0,
            7.0,
            [row * 3, row * 3 + 1, row * 3 + 2],
            ("data",),
            2,
            rank % 3,
            1,
            ("model",),
            [rank],
            True,
        )


def test_alias_groups_carry_the_alias_name():
    def fn(world):
        factors = {"data": [Factor("data.inner", 2, "mics_shard_size", rest="data.outer")]}
        mesh = Mesh(Topology.factored({"data": 4}, factors), world)
        x = torch.tensor([float(world.rank)])
        mesh["data.inner"].all_reduce(x)
        mesh["data.outer"].all_reduce(x)
        y = torch.tensor([1.0])
        mesh["data"].all_reduce(y)
        return x.item(), y.item(), sorted(axes for _, axes in mesh.comm_trace.entries())

    assert sim.run(4, fn) == [(6.0, 4.0, [("data",), ("data.inner",), ("data.outer",)])] * 4


def test_wrong_number_of_ranks():
    with pytest.raises(TopologyError, match="make 6 ranks, but the job has 2"):
        sim.run(2, lambda world: Mesh(Topology({"pipe": 2, "data": 3}), world))


def test_unknown_axis():
    with pytest.raises(TopologyError, match="unknown axis 'expert'"):
        sim.run(2, lambda world: Mesh(Topology({"data": 2}), world)["expert"])


def test_mesh_chooses_its_reduction():
    def fn(world):
        mesh = Mesh(Topology({"data": 2}), world, reduction="mpi")
        return mesh["data"].reduction, mesh.channel("x")["data"].reduction, world.comm.reduction

    assert sim.run(2, fn, reduction="ordered") == [("mpi", "mpi", "ordered")] * 2


def test_lanes_run_independently():
    """One channel waits inside an operation until the other has done its own: a single queue would never end."""

    def fn(world):
        mesh = Mesh(Topology({"data": 2}), world)
        gate = threading.Event()
        slow = mesh.channel("first")["data"].start(lambda _: gate.wait(20))
        fast = mesh.channel("second")["data"].start(lambda comm: (comm.barrier(), gate.set()))
        fast.wait(20)
        slow.wait(20)
        assert mesh.channel("first") is mesh.channel("first")
        mesh.close()

    sim.run(2, fn)


def test_lanes_need_no_common_order():
    def fn(world):
        mesh = Mesh(Topology({"data": 2}), world)
        one, two = mesh.channel("one")["data"], mesh.channel("two")["data"]
        x, y = torch.ones(5), torch.full((5,), 2.0)
        starts = [lambda: one.start_all_reduce(x), lambda: two.start_all_reduce(y)]
        works = [start() for start in (starts if world.rank == 0 else reversed(starts))]
        for work in works:
            work.wait(20)
        return x.tolist(), y.tolist()

    assert sim.run(2, fn) == [([2.0] * 5, [4.0] * 5)] * 2


def test_blocking_verbs_of_a_lane_keep_the_order():
    def fn(world):
        channel = Mesh(Topology({"data": 2}), world).channel("grads")
        x = torch.ones(3)
        work = channel["data"].start_all_reduce(x)
        channel["data"].all_reduce(x)
        assert work.is_done()
        return x.tolist()

    assert sim.run(2, fn) == [[4.0] * 3] * 2


def test_started_body_may_use_other_groups_of_its_lane():
    def fn(world):
        channel = Mesh(Topology({"pipe": 2, "data": 2}), world).channel("grads")
        x = torch.ones(3)
        channel["data"].start(lambda comm: (comm.all_reduce(x), channel["pipe"].all_reduce(x))).wait(20)
        return x.tolist()

    assert sim.run(4, fn) == [[4.0] * 3] * 4


def test_a_lane_has_no_lanes():
    with pytest.raises(TopologyError, match="channel has no channels"):
        sim.run(2, lambda world: Mesh(Topology({"data": 2}), world).channel("a").channel("b"))


def test_nothing_starts_after_close():
    def fn(world):
        mesh = Mesh(Topology({"data": 2}), world)
        comm = mesh["data"]
        comm.start_all_reduce(torch.ones(2)).wait(20)
        mesh.close()
        comm.start_all_reduce(torch.ones(2))

    with pytest.raises(CommError, match="is closed"):
        sim.run(2, fn)


def test_close_finishes_what_was_started():
    def fn(world):
        mesh = Mesh(Topology({"data": 2}), world)
        x = torch.ones(4)
        mesh["data"].start_all_reduce(x)
        mesh.channel("more")["data"].start_all_reduce(x)
        mesh.close()
        return x.sum().item() > 4

    assert all(sim.run(2, fn))


def test_no_gradients_on_the_progress_thread():
    def fn(world):
        seen = []
        world.comm.start(lambda _: seen.append(torch.is_grad_enabled())).wait(20)
        return seen

    assert sim.run(2, fn) == [[False]] * 2
    assert sim.run(1, fn) == [[False]]


def test_world_knows_nodes():
    def fn(world):
        x = torch.ones(1)
        world.node.all_reduce(x)
        return world.local_rank, world.local_size, world.node_count, list(world.node.ranks), x.item()

    assert sim.run(5, fn, ranks_per_node=2)[3:] == [(1, 2, 3, [2, 3], 2.0), (0, 1, 3, [4], 1.0)]


def test_groups_of_some_ranks():
    def fn(world):
        group = world.group([3, 1])
        if group is None:
            return None
        x = torch.tensor([float(world.rank)])
        group.all_reduce(x)
        return group.rank, list(group.ranks), x.item()

    assert sim.run(4, fn) == [None, (0, [1, 3], 4.0), None, (1, [1, 3], 4.0)]
    with pytest.raises(ConfigError, match="different ranks"):
        sim.run(2, lambda world: world.group([0, 2]))


def test_without_thread_multiple_started_verbs_run_at_once():
    def fn(world):
        plain = World(world.comm.duplicate(), world.node.duplicate(), node_count=1, has_threads=False)
        verbs.check_started(plain.comm)
        verbs.check_ring(plain.comm, torch.float32)
        mesh = Mesh(Topology({"data": 3}), plain)
        before = threading.active_count()
        x = torch.ones(4)
        work = mesh.channel("grads")["data"].start_all_reduce(x)
        assert work.is_done()
        world.comm.barrier()
        assert threading.active_count() <= before
        mesh.close()
        return x.tolist()

    assert sim.run(3, fn) == [[3.0] * 4] * 3
