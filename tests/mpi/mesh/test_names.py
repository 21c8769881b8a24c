"""The names users know, over the process-wide world."""

import logging

import pytest
import torch

import mpispeed.comm as dist
from mpispeed.base.errors import CommError, UsageError
from mpispeed.compat.partitioned_tensor import PartitionedTensor

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(autouse=True)
def joined(world):
    return world


def test_facts(world):
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    assert dist.get_local_rank() == world.local_rank
    assert dist.get_world_group() is world.comm


@pytest.mark.parametrize("async_op", [False, True])
def test_collectives(world, async_op):
    size, rank = world.size, world.rank

    def done(work):
        assert (work is not None) == async_op
        if async_op:
            work.wait(60)

    x = torch.full((3, 2), float(rank))
    done(dist.all_reduce(x, async_op=async_op))
    assert x.eq(sum(range(size))).all()
    x = torch.full((3,), float(rank))
    done(dist.all_reduce(x, dist.ReduceOp.MAX, async_op=async_op))
    assert x.eq(size - 1).all()
    x = torch.ones(2)
    done(dist.reduce(x, size - 1, async_op=async_op))
    assert x.eq(size if rank == size - 1 else 1).all()
    x = torch.full((2,), float(rank))
    done(dist.broadcast(x, size - 1, async_op=async_op))
    assert x.eq(size - 1).all()
    parts = [torch.zeros(2, 2) for _ in range(size)]
    done(dist.all_gather(parts, torch.full((2, 2), float(rank)), async_op=async_op))
    assert [p[1, 1].item() for p in parts] == list(range(size))
    out = torch.zeros(2 * size)
    done(dist.all_gather_into_tensor(out, torch.full((2,), float(rank)), async_op=async_op))
    assert out[::2].tolist() == list(range(size))
    out = torch.zeros(2)
    done(dist.reduce_scatter_tensor(out, torch.ones(2 * size), async_op=async_op))
    assert out.eq(size).all()
    done(dist.barrier(async_op=async_op))


@pytest.mark.parametrize("async_op", [False, True])
def test_all_to_all_by_rows(world, async_op):
    size, rank = world.size, world.rank
    x = torch.full((size + 1, 3), float(rank))
    sends = [2] + [1] * (size - 1)
    receives = [sends[rank]] * size
    out = torch.zeros(sum(receives), 3)
    work = dist.all_to_all_single(out, x, receives, sends, async_op=async_op)
    if work:
        work.wait(60)
    assert out[:, 0].tolist() == [float(r) for r in range(size) for _ in range(sends[rank])]
    even = torch.zeros(size)
    dist.all_to_all_single(even, torch.full((size,), float(rank)))
    assert even.tolist() == list(range(size))


@pytest.mark.mpi(min_size=2)
def test_messages_name_world_ranks(world):
    group = dist.new_group([0, world.size - 1])
    if group is None:
        return
    x = torch.tensor([float(world.rank)])
    if world.rank == 0:
        dist.send(x, world.size - 1, group=group)
        dist.irecv(x, world.size - 1, group=group).wait(60)
        assert x.item() == 0.0
        with pytest.raises(CommError, match="world rank 99"):
            dist.send(x, 99, group=group)
    else:
        assert dist.recv(x, 0, group=group) == 0
        dist.isend(x, 0, group=group).wait(60)
        assert x.item() == 0.0
    assert dist.get_world_size(group) == 2


def test_wrong_lists(world):
    with pytest.raises(CommError, match="the list has"):
        dist.all_gather([torch.zeros(1)] * (world.size + 1), torch.zeros(1))


def test_journal_and_summary():
    dist.comm_trace().reset()
    dist.all_reduce(torch.ones(8))
    assert dist.comm_trace().entries()["all_reduce", ("world",)].count == 1
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("mpispeed.comm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        dist.log_summary()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "all_reduce" in lines[0]
    assert "world" in lines[0]


@pytest.mark.parametrize("shape", [(3, 8), (5, 1), (2,), (), (0, 3)], ids=str)
def test_each_rank_keeps_a_part_of_a_tensor(world, shape):
    """As a pipeline of DeepSpeed sends activations between stages: parts and their description travel."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    cut = PartitionedTensor(whole, world.comm)
    counts = world.comm.gather_objects(cut.data().numel())
    assert (sum(counts), max(counts) - min(counts) < 2) == (whole.numel(), True)
    assert cut.even_split == (len(set(counts)) == 1)
    assert torch.equal(cut.full(), whole)
    again = PartitionedTensor.from_meta(cut.to_meta(), cut.data().clone(), world.comm)
    assert (again.full_size(), again.local_size()) == (list(shape), cut.local_size())
    assert torch.equal(again.full("cpu"), whole)
    other = cut.to_meta()
    other[1 + len(shape)] += 1
    with pytest.raises(UsageError, match=f"of its group, and the tensor was divided for rank .* of {world.size + 1};"):
        PartitionedTensor.from_meta(other, cut.data(), world.comm)
