"""What can be done with parameters that were cut at birth and that no engine has yet, on simulated ranks."""

import logging
import math

import pytest
import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.mesh import sim
from mpispeed.sharding import sharded_init, sharded_param
from mpispeed.sharding.gathered import GatheredParameters
from mpispeed.sharding.sharded_init import ShardedInit


def init_shard(world, *, dtype=None, is_active=True):
    """A keeper and a module that it has cut; values differ between ranks before."""
    module = nn.Linear(5, 3)
    with torch.no_grad():
        module.weight.copy_(torch.arange(15.0).view(3, 5) + 100 * world.rank)
        module.bias.fill_(world.rank)
    owner = ShardedInit(world.comm, dtype)
    owner.is_active = is_active
    owner.cut(module)
    return owner, module


EXPECTED = torch.arange(15.0).view(3, 5)
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])


@RANKS
def test_every_rank_keeps_its_part_of_the_first_ranks_values(ranks):
    def work(world):
        _, module = init_shard(world)
        part = math.ceil(15 / ranks)
        shard = sharded_init.find_init_shard(module.weight).shard
        padded = torch.cat([EXPECTED.view(-1), torch.zeros(part * ranks - 15)])
        assert torch.equal(shard, padded[world.rank * part : (world.rank + 1) * part])
        assert module.weight.shape == (3, 5)
        assert module.weight.requires_grad

    sim.run(ranks, work)


@RANKS
def test_reads_and_changes_while_active(ranks):
    def work(world):
        owner, module = init_shard(world)
        assert torch.equal(module.weight, EXPECTED)
        nn.init.constant_(module.bias, 4.0 + world.rank)
        module.weight.data.add_(1 + world.rank)
        with torch.no_grad():
            module.weight[0, 0] = -1.0 - world.rank
        owner.settle()
        assert sharded_param.is_sharded(module.weight)
        assert owner.live_elements == 0
        with GatheredParameters(module.parameters()):
            assert bool((module.bias == 4.0).all())
            assert module.weight[0, 0] == -1.0
            assert torch.equal(module.weight.view(-1)[1:], EXPECTED.view(-1)[1:] + 1)

    sim.run(ranks, work)


def test_inactive_ones_are_read_in_contexts_only():
    def work(world):
        _, module = init_shard(world, is_active=False)
        with pytest.raises(UsageError, match=r"'Linear\.weight' is cut over 2 ranks by zero\.Init"):
            module.weight.sum()
        with GatheredParameters(module.weight):
            assert torch.equal(module.weight, EXPECTED)
        assert "Linear.weight" in repr(module.weight)

    sim.run(2, work)


def test_new_dtype_and_new_memory():
    def work(world):
        owner, module = init_shard(world, dtype=torch.bfloat16)
        assert module.weight.dtype == torch.bfloat16
        module.weight.data = torch.full((3, 5), 2.0 + world.rank, dtype=torch.bfloat16)
        owner.settle(is_final=True)
        with GatheredParameters(module.weight):
            assert bool((module.weight == 2.0).all())
        with pytest.raises(UsageError, match="had 15 elements when it was sharded and has 2 now"):
            module.weight.data = torch.zeros(2)
            owner.settle(is_final=True)

    sim.run(2, work)


def test_a_view_that_outlives_the_context_is_warned_of(caplog):
    def work(world):
        owner, module = init_shard(world)
        view = module.weight.data
        owner.settle()
        assert not sharded_param.is_sharded(module.weight)  # it may be changed through the view
        view.fill_(3.0)
        owner.settle(is_final=True)
        with GatheredParameters(module.weight):
            assert bool((module.weight == 3.0).all())

    with caplog.at_level(logging.WARNING):
        sim.run(2, work)
    assert any("a view of parameter Linear.weight of 15 elements is still held" in m for m in caplog.messages)


def test_casts_and_moves_that_change_nothing():
    def work(world):
        _, module = init_shard(world, is_active=False)
        before = sharded_init.find_init_shard(module.weight).shard
        assert module.to("cpu") is module
        module.to(torch.device("cpu"), torch.float32, non_blocking=True).float().cpu()
        assert module.weight.to(module.bias) is module.weight
        assert sharded_init.find_init_shard(module.weight).shard is before
        with pytest.raises(UsageError, match="GatheredParameters"):
            module.half()
        with pytest.raises(UsageError, match="GatheredParameters"):
            module.weight.to("cpu", copy=True)
        assert sharded_param.is_sharded(module.weight)

    sim.run(2, work)


def test_another_keeper_takes_over():
    class Other:
        rests_cut, is_of_init = True, False
        left = None  # not called: nobody takes over from it

    def work(world):
        _, module = init_shard(world)
        other = Other()
        sharded_param.to_sharded(module.weight, torch.bfloat16)
        sharded_param.watch(module.weight, other)
        assert sharded_init.find_init_shard(module.weight) is None
        assert sharded_init.find_init_shard(module.bias) is not None
        assert module.weight.dtype == torch.bfloat16
        assert module.weight.shape == (3, 5)

    sim.run(2, work)


def test_what_is_cut_and_what_is_not():
    def work(world):
        module = nn.Module()
        module.meta = nn.Parameter(torch.ones(3, device="meta"))
        module.lazy = nn.UninitializedParameter()
        module.empty = nn.Parameter(torch.ones(0, 4))
        module.scalar = nn.Parameter(torch.tensor(3.0))
        module.double_one = nn.Parameter(torch.ones(4, dtype=torch.float64))
        module.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        ShardedInit(world.comm, torch.float16).cut(module)
        cut = {name for name, param in module.named_parameters() if sharded_param.is_sharded(param)}
        assert cut == {"empty", "scalar", "double_one", "whole"}
        assert (module.scalar.dtype, module.double_one.dtype) == (torch.float16, torch.float64)
        with GatheredParameters([module.empty, module.scalar, module.whole], modifier_rank=0):
            assert module.empty.shape == (0, 4)
            assert module.scalar == 3.0
            assert torch.equal(module.whole, torch.arange(3))

    sim.run(3, work)


def test_ranks_that_make_different_modules_are_told():
    def work(world):
        module = nn.Linear(2, 2) if world.rank == 0 else nn.LayerNorm(2)
        with pytest.raises(Exception, match=r"Linear\.weight.*LayerNorm\.weight"):
            ShardedInit(world.comm, None).cut(module)

    sim.run(2, work)
