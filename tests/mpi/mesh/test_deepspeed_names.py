"""Every verb of deepspeed.comm, on contiguous and other tensors, now and started, over each kind of group."""

import inspect
import time

import pytest
import torch
import torch.distributed

import mpispeed.comm as dist
from mpispeed.base.errors import CommError
from mpispeed.compat import comm_groups
from mpispeed.mesh import comms_log
from mpispeed.mesh.collectives.work import Work

pytestmark = pytest.mark.mpi(min_size=1)

LATE_SECONDS = 1.5

NAMES = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier", "broadcast",
    "broadcast_object_list", "configure", "destroy_process_group", "gather", "get_all_ranks_from_group",
    "get_global_rank", "get_local_rank", "get_rank", "get_world_group", "get_world_size",
    "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_reduce_scatter_tensor",
    "inference_all_reduce", "init_distributed", "initialize_mesh_device", "irecv", "is_available", "is_initialized",
    "isend", "log_summary", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn",
    "reduce_scatter_tensor", "scatter", "send", "set_backend",
}  # fmt: skip


@pytest.fixture(autouse=True)
def joined(world):
    return world


@pytest.fixture(params=[False, True], ids=["now", "started"])
def call(request):
    """Calls a verb, and waits for it if it was started."""

    def carry_out(verb, *args, **kwargs):
        work = verb(*args, async_op=request.param, **kwargs)
        assert (work is not None) == request.param
        if work is not None:
            work.wait(60)
            assert work.is_completed()

    return carry_out


def numbered(*shape):
    """A tensor of this rank that is not contiguous, with values that differ between ranks."""
    return torch.full(shape[::-1], float(dist.get_rank())).t()


@pytest.mark.ranks(1)
def test_names_and_signatures():
    assert not NAMES - set(dist.__all__)
    assert [op.name for op in dist.ReduceOp] == ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    assert dist.is_available()
    assert dist.has_all_gather_into_tensor()
    assert dist.has_reduce_scatter_tensor()
    assert dist.has_all_reduce_coalesced()
    assert dist.has_coalescing_manager()
    assert list(inspect.signature(dist.all_to_all_single).parameters) == [
        "output", "tensor", "output_split_sizes", "input_split_sizes", "group", "async_op", "prof", "log_name", "debug",
    ]  # fmt: skip
    with pytest.raises(TypeError, match="unexpected keyword argument 'profile'"):
        dist.barrier(profile=True)


def test_reductions(world, call):
    size, rank = world.size, world.rank
    total = sum(range(size))
    x = numbered(3, 2)
    call(dist.inference_all_reduce, x)
    assert x.eq(total).all()
    x, y = numbered(3, 2), torch.tensor([rank])
    call(dist.all_reduce_coalesced, [x, y], torch.distributed.ReduceOp.MAX)
    assert x.eq(size - 1).all()
    assert y.item() == size - 1
    bits = torch.tensor([1 << rank])
    call(dist.all_reduce, bits, dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1
    x = numbered(3, 2)
    call(dist.reduce, x, size - 1, torch.distributed.ReduceOp.AVG)
    assert x.eq(total / size if rank == size - 1 else rank).all()
    out = torch.zeros(2)
    call(dist.reduce_scatter, out, [torch.full((2,), float(part)) for part in range(size)])
    assert out.eq(size * rank).all()
    uneven = torch.zeros(rank + 1)
    call(dist.reduce_scatter, uneven, [torch.ones(part + 1) for part in range(size)])
    assert uneven.eq(size).all()
    for verb in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
        call(verb, out, torch.full((2, size), float(rank)).t())
        assert out.eq(total).all()
    call(dist.reduce_scatter_tensor, output=out, input=torch.ones(2 * size))
    assert out.eq(size).all()


def test_moves(world, call):
    size, rank = world.size, world.rank
    x = numbered(2, 3)
    call(dist.broadcast, x, size - 1)
    assert x.eq(size - 1).all()
    for verb in (dist.allgather_fn, dist.all_gather_into_tensor):
        out = torch.zeros(3, 2 * size).t()
        call(verb, out, numbered(2, 3))
        assert out[::2, 1].tolist() == list(range(size))
    outs = [torch.zeros(size), torch.zeros(size, dtype=torch.int64)]
    call(dist.all_gather_coalesced, outs, [torch.tensor([float(rank)]), torch.tensor([rank])])
    assert [out.tolist() for out in outs] == [list(range(size))] * 2
    sizes = [torch.zeros(part + 1) for part in range(size)]
    call(dist.all_gather, sizes, torch.full((rank + 1,), float(rank)))
    assert [x[-1].item() for x in sizes] == list(range(size))
    root = size - 1
    places = [torch.zeros(3, 2).t() for _ in range(size)] if rank == root else None
    call(dist.gather, numbered(2, 3), places, dst=root)
    assert places is None or [x[1, 1].item() for x in places] == list(range(size))
    mine = torch.zeros(3, 2).t()
    parts = [torch.full((2, 3), float(part)) for part in range(size)] if rank == root else None
    call(dist.scatter, mine, parts, src=root)
    assert mine.eq(rank).all()
    outs = [torch.zeros(rank + 1) for _ in range(size)]
    call(dist.all_to_all, outs, [torch.full((part + 1,), float(rank)) for part in range(size)])
    assert [x[-1].item() for x in outs] == list(range(size))
    with pytest.raises(CommError, match="2 output tensors for 1"):
        dist.all_gather_coalesced(outs[:1] * 2, outs[:1])


def test_objects(world):
    size, rank = world.size, world.rank
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": other} for other in range(size)]
    objects = [("a", 1), None] if rank == size - 1 else [None, 0]
    dist.broadcast_object_list(objects, size - 1, device="cpu")
    assert objects == [("a", 1), None]
    with pytest.raises(CommError, match=f"{size + 1} places"):
        dist.all_gather_object([None] * (size + 1), 0)


@pytest.mark.ranks(2, 3)
def test_any_send_meets_any_receive(world):
    other = 1 - world.rank
    if world.rank > 1:
        return
    for sends, receives in ((dist.send, dist.irecv), (dist.isend, dist.recv)):
        x, y = numbered(2, 3), torch.zeros(3, 2).t()
        calls = [(sends, x), (receives, y)]
        for handle in [verb(tensor, other) for verb, tensor in (calls if world.rank == 0 else calls[::-1])]:
            if isinstance(handle, Work):
                handle.wait(60)
        assert y.eq(other).all()


@pytest.mark.ranks(3)
def test_messages_of_any_rank(world, monkeypatch):
    monkeypatch.setattr(world.comm.started.group.limits, "chunk_bytes", 8)  # in three pieces
    x = torch.zeros(3, 2).t()
    if world.rank:
        dist.send(numbered(2, 3), 0, tag=world.rank)
        return
    work = dist.irecv(x, tag=2)
    work.wait(60)
    assert x.eq(2).all()
    assert dist.recv(x, tag=1) == 1
    assert x.eq(1).all()


def test_groups_and_ranks(world):
    last = world.size - 1
    ranks = sorted({0, last})
    group = dist.new_group(ranks)
    if group is not None:
        assert dist.get_all_ranks_from_group(group) == ranks
        assert dist.get_global_rank(group, len(ranks) - 1) == last
        with pytest.raises(CommError, match="group_rank=9"):
            dist.get_global_rank(group, 9)
        x = torch.tensor([world.rank])
        dist.broadcast(x, last, group)
        assert x.item() == last
    assert dist.get_all_ranks_from_group() == list(range(world.size))
    assert dist.get_global_rank(group_rank=last) == last
    with pytest.raises(CommError, match="-100 of type int"):
        dist.barrier(torch.distributed.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.ranks(2, 3)
def test_groups_of_torch(world, monkeypatch):
    monkeypatch.setattr(comm_groups, "_LEFT", [])
    assert dist.init_distributed() is world
    assert dist.is_initialized()
    last = world.size - 1
    default = torch.distributed.group.WORLD
    group = torch.distributed.new_group([last, 0], use_local_synchronization=False)
    assert dist.get_world_size(default) == world.size
    x = torch.tensor([1.0])
    dist.all_reduce(x, torch.distributed.ReduceOp.SUM, group=default)
    assert x.item() == world.size
    if world.rank in (0, last):
        assert dist.get_global_rank(group, dist.get_rank(group)) == world.rank
        x = torch.tensor([world.rank])
        dist.broadcast(x, last, group=group)
        assert x.item() == last
    mesh = dist.initialize_mesh_device((world.size,), ("data",))
    assert dist.get_world_size(mesh.get_group("data")) == world.size
    dist.destroy_process_group()
    assert not torch.distributed.is_initialized()
    assert not dist.is_initialized()
    dist.barrier()  # the world stays
    with pytest.raises(RuntimeError, match="init_distributed"):
        dist.initialize_mesh_device((world.size,), ("data",))
    with pytest.raises(CommError, match="was destroyed"):
        dist.barrier(default)
    dist.init_distributed()
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.mark.ranks(1, 2)
def test_groups_over_another_backend(world, monkeypatch):
    monkeypatch.setattr(comm_groups, "_LEFT", [])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        alien = torch.distributed.group.WORLD
        if world.size == 1:
            assert dist.get_world_size(alien) == 1
        else:
            with pytest.raises(CommError, match=r"ranks \[0\] over backend 'gloo'"):
                dist.barrier(alien)
        dist.destroy_process_group()
        assert torch.distributed.is_initialized()
        assert not dist.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.ranks(2, 3, 4)
def test_the_late_rank_is_named(world):
    late = world.size - 1
    dist.monitored_barrier(timeout=60)
    if world.rank == late:
        time.sleep(LATE_SECONDS)
    with pytest.raises(CommError, match=rf"rank {late} had not come within 0\.6 s"):
        dist.monitored_barrier(timeout=0.6, wait_all_ranks=True)
    dist.monitored_barrier()
    if world.rank == 0:
        time.sleep(LATE_SECONDS)
        dist.monitored_barrier(timeout=30)
    else:
        with pytest.raises(CommError, match="rank 0 had not come"):
            dist.monitored_barrier(timeout=0.2)
    dist.monitored_barrier(timeout=60)


@pytest.mark.ranks(2)
def test_rows_of_the_comms_logger(world):
    dist.configure(enabled=True, prof_all=False, prof_ops=["gather"])
    try:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), prof=True)
        dist.all_reduce(torch.ones(2), prof=True, log_name="loss", async_op=True).wait(60)
        dist.gather(torch.ones(1), [torch.ones(1)] * 2 if world.rank == 0 else None, debug="somebody")
        rows = {(key.name, row.count) for key, row in comms_log.of_process().rows().items()}
        assert rows == {("all_reduce", 1), ("loss", 1), ("gather", 1)}
    finally:
        comms_log.of_process().detach()
        comms_log.of_process().clear()
        comms_log.of_process().settings = comms_log.Settings()


def test_names_of_other_backends(world, caplog):
    dist.set_backend("mpi")
    assert not caplog.records
    dist.set_backend("nccl")
    assert ("set_backend('nccl') has no effect" in caplog.text) == (world.rank == 0)
