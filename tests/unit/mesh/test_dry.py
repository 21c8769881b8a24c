"""A rank of a job that is not started: verbs check and count as those of simulated ranks, and nothing moves."""

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import sim
from mpispeed.mesh.compressed.onebit import OneBitErrors, compressed_all_reduce
from mpispeed.mesh.compressed.onebit_nodes import compressed_all_reduce_through, zero_errors
from mpispeed.mesh.compressed.quantized import Feedback, quantized_gather_through, quantized_reduce_scatter
from mpispeed.mesh.dry import DryWorld
from mpispeed.mesh.mesh import Mesh, Topology

MANY = 10_240
TOPOLOGY = Topology({"outer": 2, "inner": 2}, {"data": ("outer", "inner")})
META, HOST = torch.device("meta"), torch.device("cpu")


def plain(mesh, device):
    """Every verb that a group has, blocking and started."""
    comm, n = mesh["data"], mesh["data"].size
    for dtype in (torch.float32, torch.bfloat16):
        full, shard = torch.zeros(n * 96, dtype=dtype, device=device), torch.zeros(96, dtype=dtype, device=device)
        comm.all_reduce(full, "avg")
        comm.all_reduce(full, scale=0.5)
        comm.reduce(shard)
        comm.broadcast(full, 1)
        comm.all_gather(full, shard)
        comm.all_gather(full, full[comm.rank * 96 : (comm.rank + 1) * 96])
        comm.reduce_scatter(torch.zeros(96, device=device), full)
        comm.reduce_scatter(full[comm.rank * 96 : (comm.rank + 1) * 96], full)
        comm.all_to_all(torch.zeros_like(full), full)
        comm.gather(full, shard)
        comm.scatter(shard, full)
        works = [
            comm.start_all_gather(full, shard),
            comm.start_all_reduce(full),
            comm.start_reduce_scatter(shard, full),
        ]
        for work in works:
            work.wait()
    comm.barrier()
    comm.agree(True)
    assert comm.gather_objects("same") == ["same"] * n
    mesh[()].all_reduce(torch.zeros(5, device=device), scale=2.0)


def compressed(mesh, device):
    """Verbs that are made of messages in codes."""
    inner, outer, comm, n = mesh["inner"], mesh["outer"], mesh["data"], 3 * 256
    full, shard = torch.zeros(4 * n, device=device), torch.zeros(n, device=device)
    quantized_gather_through([outer, inner], full, shard, block=256)
    for feedback in (None, Feedback()):
        quantized_reduce_scatter(inner, outer, shard, full, block=256, feedback=feedback)
    assert feedback is not None
    assert feedback.elements == 4 * n + 2 * n
    compressed_all_reduce(comm, full, OneBitErrors.zeros(4 * n, 4, device))
    compressed_all_reduce_through(inner, outer, full, zero_errors(4 * n, 2, 2, device))


def counted(mesh):
    return {key: (entry.count, entry.bytes) for key, entry in mesh.comm_trace.entries().items()}


@pytest.mark.parametrize("use", [plain, compressed])
def test_the_trace_is_that_of_a_run(use):
    def job(world):
        mesh = Mesh(TOPOLOGY, world)
        use(mesh, HOST)
        return counted(mesh)

    traces = sim.run(4, job)
    for rank, trace in enumerate(traces):
        mesh = Mesh(TOPOLOGY, DryWorld(rank, 4))
        use(mesh, META)
        assert counted(mesh) == trace


def test_buffers_are_checked():
    comm = Mesh(TOPOLOGY, DryWorld(3, 4))["data"]
    full = torch.zeros(40, device=META)
    with pytest.raises(CommError, match="needs 4 x 11 = 44"):
        comm.all_gather(full, torch.zeros(11, device=META))
    with pytest.raises(CommError, match="is not the slice of rank 3"):
        comm.all_gather(full, full[:10])
    comm.all_gather(full, torch.zeros(100, device=META)[:10])  # another tensor at the same offset
    with pytest.raises(CommError, match="contiguous"):
        comm.all_reduce(torch.zeros(4, 4, device=META).t())
    with pytest.raises(CommError, match="give two buffers"):
        comm.all_to_all(full, full)


def test_tensors_without_data_cannot_be_sent_in_a_run():
    with pytest.raises(CommError, match="needs a dense tensor in memory"):
        sim.run(2, lambda world: world.comm.all_reduce(torch.zeros(4, device=META)))


def test_started_operations_end_when_they_are_waited_for():
    mesh, order = Mesh(TOPOLOGY, DryWorld(0, 4)), []
    channel = mesh.channel("params")["data"]

    def run(name):
        assert mesh.world.running == "params"
        channel.all_reduce(torch.zeros(3, device=META))
        order.append(name)

    works = [channel.start(lambda _, name=name: run(name)) for name in "abc"]
    assert order == []
    works[1].wait()
    assert order == ["a", "b"]
    channel.barrier()  # in its turn
    assert order == ["a", "b", "c"]
    assert mesh.world.running == ""

    works = [channel.start(lambda comm: comm.send(torch.zeros(1, device=META), 0)), channel.start(lambda _: run("d"))]
    works[1].wait()
    with pytest.raises(CommError, match="a rank does not send to itself"):
        works[0].wait()


def test_ranks_cost_nothing():
    topology = Topology({"pipe": 8, "data.0": 16, "data.1": 10, "model": 8}, {"data": ("data.0", "data.1")})
    for rank in (0, 4_711, MANY - 1):
        mesh = Mesh(topology, DryWorld(rank, MANY))
        channels = [mesh.channel(name) for name in ("params", "grads")]
        for one in (mesh, *channels):
            for axes in ("pipe", "data", ("pipe", "model"), topology.names):
                comm = one[axes]
                assert comm.ranks[comm.rank] == rank
        mesh[topology.names].all_reduce(torch.zeros(7, device=META))
        sent = mesh.comm_trace.total_bytes("all_reduce")
        assert sent == 2 * 28 * (MANY - 1) // MANY
