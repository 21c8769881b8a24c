"""Every verb, dtype and number of ranks on simulated ranks; a small slice of it alone on one rank without MPI."""

import pytest
import torch

from mpispeed.mesh import sim, solo_comm
from tests.helpers import verbs

SIZES = (1, 2, 3, 4)
REDUCTIONS = ("ordered", "mpi")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", verbs.REDUCIBLE, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(size, dtype, reduction):
    sim.run(size, lambda world: verbs.check_reductions(world.comm, dtype), reduction=reduction)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_scales(size, dtype, reduction):
    sim.run(size, lambda world: verbs.check_scales(world.comm, dtype), reduction=reduction)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", verbs.MOVABLE, ids=str)
def test_moves(size, dtype):
    sim.run(size, lambda world: verbs.check_moves(world.comm, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", verbs.HALVES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_half_floats_are_summed_wide(size, dtype, reduction):
    sim.run(size, lambda world: verbs.check_half_accumulation(world.comm, dtype), reduction=reduction)


@pytest.mark.parametrize("size", (1, 2, 3, 4, 5, 7))
@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
def test_ordered_is_the_tree(size, dtype):
    sim.run(size, lambda world: verbs.check_ordered_bits(world.comm, dtype))


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool), ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_chunks(size, dtype, reduction):
    def check(world):
        world.comm.group.reduction = "ordered" if dtype in verbs.REALS else reduction
        verbs.check_chunks(world.comm, dtype)

    sim.run(size, check, reduction=reduction)


@pytest.mark.parametrize("size", SIZES)
def test_refusals(size):
    sim.run(size, lambda world: verbs.check_refusals(world.comm))


@pytest.mark.parametrize("size", SIZES)
def test_agreement_and_objects(size):
    sim.run(size, lambda world: verbs.check_agreement(world.comm))


@pytest.mark.parametrize("size", SIZES)
def test_journal(size):
    sim.run(size, lambda world: verbs.check_journal(world.comm))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", (verbs.check_any_source, verbs.check_members))
def test_messages_and_members(size, check):
    sim.run(size, lambda world: check(world.comm))


@pytest.mark.parametrize("size", SIZES)
def test_started(size):
    sim.run(size, lambda world: verbs.check_started(world.comm))


def test_one_rank_without_mpi():
    for dtype in verbs.REDUCIBLE:
        verbs.check_reductions(solo_comm(), dtype)
    for dtype in verbs.MOVABLE:
        verbs.check_moves(solo_comm(), dtype)
    for check in (verbs.check_refusals, verbs.check_agreement, verbs.check_journal, verbs.check_started):
        check(solo_comm())


def test_empty_tensors_meet():
    def fn(world):
        x = torch.zeros(0)
        world.comm.all_reduce(x)
        world.comm.broadcast(x)
        world.comm.all_gather(torch.zeros(0), x)
        world.comm.reduce_scatter(x, torch.zeros(0))
        world.comm.all_to_all(torch.zeros(0), x)

    sim.run(3, fn)


def test_unknown_reduction_is_refused():
    with pytest.raises(Exception, match=r"'ordered'.*'mpi'"):
        solo_comm(reduction="fastest")
