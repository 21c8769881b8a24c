"""Groups in any order and made by their members alone; tensors that overlap, differ in size or are sparse."""

import pytest
import torch
import torch.distributed as dist

from mpispeed.base.errors import CommError
from mpispeed.torch_backend import Options
from tests.helpers.torch_verbs import reduce_op, single

pytestmark = pytest.mark.mpi(min_size=1)


def test_positions_are_those_of_the_given_order(both):
    groups = both["sub-group"]
    if groups.me < 0:
        assert groups.ours is dist.GroupMember.NON_GROUP_MEMBER
        return
    assert dist.get_process_group_ranks(groups.ours) == groups.ranks
    assert dist.get_rank(groups.ours) == groups.ours.rank() == groups.me
    assert groups.ours.size() == len(groups.ranks)
    out = torch.zeros(len(groups.ranks))
    single["all_gather"](out, torch.tensor([float(dist.get_rank())]), groups.ours)
    assert out.tolist() == groups.ranks


def test_groups_made_by_their_members_alone(torch_world):
    world = torch_world
    ranks = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    for _ in range(2):
        group = dist.new_group(ranks, use_local_synchronization=True)
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [len(ranks)] * 3
        dist.destroy_process_group(group)
    if world.rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        dist.barrier(group=alone)
        dist.destroy_process_group(alone)


def test_many_groups_come_and_go(torch_world):
    for _ in range(20):
        group = dist.new_group()
        x = torch.ones(1)
        work = dist.all_reduce(x, group=group, async_op=True)
        dist.destroy_process_group(group)
        assert work.is_completed()
        assert x.item() == torch_world.size


def test_ordered_sums_do_not_depend_on_the_library(torch_world):
    group = dist.new_group(pg_options=Options(reduction="ordered"))
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) for rank in range(torch_world.size)]
    x = parts[torch_world.rank].clone()
    dist.all_reduce(x, group=group)
    while len(parts) > 1:  # neighbouring pairs
        pairs = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        parts = pairs
    assert torch.equal(x, parts[0])
    dist.destroy_process_group(group)


def test_a_destroyed_group_says_so(torch_world):
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(CommError, match="was destroyed; make a new one"):
        group.allreduce([torch.ones(1)])
    with pytest.raises(ValueError, match=r"[Ii]nvalid process group"):
        dist.destroy_process_group(group)


@pytest.mark.ranks(1, 2, 3)
def test_a_group_that_is_aborted_is_let_go(torch_world):
    group, count = dist.new_group(), len(torch_world._own)
    if torch_world.rank == 0 and torch_world.size > 1:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        message = dist.irecv(torch.ones(1), 1, group=group)
    group.abort()
    assert len(torch_world._own) == count - 1
    if torch_world.rank == 0 and torch_world.size > 1:
        for left in (work, message):
            with pytest.raises(CommError, match="was given up"):
                left.wait()
    with pytest.raises(CommError, match="was destroyed; make a new one"):
        group.allreduce([torch.ones(1)])
    dist.destroy_process_group(group)


# -- tensors ---------------------------------------------------------------------------------------------------------


def test_an_all_gather_in_place(both):
    size, me = len(both["world"].ranks), both["world"].me
    out = torch.full((size, 4), -1.0)
    out[me] = me
    single["all_gather"](out, out[me])
    assert out.tolist() == [[float(rank)] * 4 for rank in range(size)]
    out.fill_(-1)[me] = 2.0 * me
    dist.all_gather(list(out.unbind()), out[me])
    assert out.tolist() == [[2.0 * rank] * 4 for rank in range(size)]


def test_a_reduce_scatter_in_place(both):
    size, me = len(both["world"].ranks), both["world"].me
    x = torch.full((size, 4), 1.0)
    single["reduce_scatter"](x[me], x)
    assert x.tolist() == [[size if rank == me else 1.0] * 4 for rank in range(size)]


@pytest.mark.parametrize("is_strided", (False, True))
def test_lists_of_different_sizes(both, is_strided):
    size, me = len(both["world"].ranks), both["world"].me

    def laid(x):
        return x.t().contiguous().t() if is_strided else x

    parts = [laid(torch.full((rank, 2), float(rank))) for rank in range(1, size + 1)]
    outs = [laid(torch.zeros(rank, 2)) for rank in range(1, size + 1)]
    dist.all_gather(outs, parts[me])
    assert all(torch.equal(x, y) for x, y in zip(outs, parts, strict=True))
    out = laid(torch.zeros(me + 1, 2))
    dist.reduce_scatter(out, parts)
    assert torch.equal(out, parts[me] * size)
    swapped = [laid(torch.zeros(me + 1, 2)) for _ in range(size)]
    dist.all_to_all(swapped, parts)
    assert all(torch.equal(x, parts[me]) for x in swapped)


def test_conjugates_and_negatives(both):
    size = len(both["world"].ranks)
    x = torch.full((3,), 1 + 2j)
    out = torch.zeros(3 * size, dtype=x.dtype)
    group = both["world"].ours  # torch's own functions refuse conjugates that are not resolved
    group.all_gather_single(out, x.conj()).wait()
    assert torch.equal(out, torch.full((3 * size,), 1 - 2j))
    y = x.conj().imag
    assert y.is_neg()
    outs = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(outs, y)
    assert all(z.tolist() == [-2.0] * 3 for z in outs)


@pytest.mark.parametrize("count", (0, 1, 3))
def test_sums_of_sparse_tensors(both, count):
    groups = both["world"]
    size, me = len(groups.ranks), groups.me

    def given(rank):
        rows = torch.tensor([[(rank + 2 * i) % 8 for i in range(count + rank % 2)]], dtype=torch.int64)
        return torch.sparse_coo_tensor(rows, torch.full((rows.shape[1], 2), rank + 1.0), (8, 2), check_invariants=True)

    total = sum(given(rank).to_dense() for rank in range(size))
    ours, gloo = given(me), given(me)
    dist.all_reduce(ours)
    dist.all_reduce(gloo, group=groups.gloo)
    assert torch.equal(ours.to_dense(), total)
    assert torch.equal(gloo.to_dense(), total)
    mean = given(me)
    dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=True).wait()
    assert torch.allclose(mean.to_dense(), total / size)
    with pytest.raises(CommError, match="sums of sparse_coo tensors"):
        dist.all_reduce(given(me), dist.ReduceOp.MAX)


@pytest.mark.parametrize("factor", (0.5, torch.tensor(0.5), torch.tensor([2.0])))
def test_factors_of_sums(both, factor):
    size = len(both["world"].ranks)
    op = torch._C._distributed_c10d._make_nccl_premul_sum(factor)
    x = torch.ones(3)
    dist.all_reduce(x, op)
    assert x.tolist() == [size * float(factor)] * 3


def test_factors_that_cannot_be(both):
    make = torch._C._distributed_c10d._make_nccl_premul_sum
    with pytest.raises(CommError, match="whole numbers need a whole factor"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), make(0.5))
    with pytest.raises(CommError, match="booleans none"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), reduce_op("premul"))
