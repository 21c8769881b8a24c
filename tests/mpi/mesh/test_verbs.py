"""Every verb and dtype over MPI, on any number of ranks: by messages, in many messages, and through shared memory."""

import pytest
import torch

from mpispeed.mesh.backends import shared_memory, shared_scratch
from tests.helpers import verbs

pytestmark = pytest.mark.mpi(min_size=1)

CHUNKED = (torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool)


@pytest.fixture(params=["ordered", "mpi"])
def reducing(comm, request):
    """All ranks, under either order of reduction, without slots in shared memory (test_one_shot.py has them)."""
    limits = comm.group.limits
    kept = comm.reduction, limits.one_shot_bytes
    comm.group.reduction, limits.one_shot_bytes = request.param, 0
    yield comm
    comm.group.reduction, limits.one_shot_bytes = kept


@pytest.mark.parametrize("dtype", verbs.REDUCIBLE, ids=str)
def test_reductions(reducing, dtype):
    verbs.check_reductions(reducing, dtype)


@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
def test_scales(reducing, dtype):
    verbs.check_scales(reducing, dtype)


@pytest.mark.parametrize("dtype", verbs.MOVABLE, ids=str)
def test_moves(comm, dtype):
    verbs.check_moves(comm, dtype)


def test_messages_of_any_rank(comm):
    verbs.check_any_source(comm)


def test_groups_made_by_their_members(comm):
    verbs.check_members(comm)


@pytest.mark.parametrize("dtype", verbs.HALVES, ids=str)
def test_half_floats_are_summed_wide(reducing, dtype):
    verbs.check_half_accumulation(reducing, dtype)


@pytest.fixture
def plain(comm):
    """All ranks in rank order, without the shortcut through shared memory."""
    made = comm.duplicate()
    made.group.reduction, made.transport.fast, made.group.limits.one_shot_bytes = "ordered", lambda: None, 0
    yield made
    made.close()


@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
def test_ordered_is_the_tree_by_messages(plain, dtype):
    verbs.check_ordered_bits(plain, dtype)


@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
def test_ordered_is_the_tree_in_shared_memory(comm, dtype):
    made = comm.duplicate()
    limits = made.group.limits
    made.group.reduction, limits.fast_bytes, limits.one_shot_bytes = "ordered", 1, 0
    verbs.check_ordered_bits(made, dtype, (16384 * 4 + 5, 100_003))
    assert (made.transport.fast() is not None) == (comm.size > 1)
    made.close()


@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
def test_small_pieces_of_shared_memory(comm, dtype, monkeypatch):
    monkeypatch.setattr(shared_scratch, "PIECE_BYTES", 8192)
    made = comm.duplicate()
    limits = made.group.limits
    made.group.reduction, limits.fast_bytes, limits.one_shot_bytes = "ordered", 1, 0
    verbs.check_ordered_bits(made, dtype, (100_003,))
    made.close()


@pytest.mark.parametrize("dtype", (torch.float32, torch.uint8, torch.complex128), ids=str)
@pytest.mark.parametrize("piece_bytes", (8192, 4 << 20))
def test_gathers_in_shared_memory(comm, dtype, piece_bytes, monkeypatch):
    monkeypatch.setattr(shared_scratch, "PIECE_BYTES", piece_bytes)
    count = 40_001
    made = comm.duplicate()
    made.group.limits.fast_bytes, made.group.limits.one_shot_bytes = 1, 0
    out, part = torch.zeros(comm.size * count, dtype=dtype), verbs.values(comm.rank, count, dtype)
    made.all_gather(out, part)
    assert verbs.same(out, torch.cat([verbs.values(r, count, dtype) for r in range(comm.size)]))
    out.view(comm.size, count)[comm.rank] = part * 2
    made.all_gather(out, out.view(comm.size, count)[comm.rank])
    assert verbs.same(out, torch.cat([verbs.values(r, count, dtype) * 2 for r in range(comm.size)]))
    assert (made.transport.fast() is not None) == (comm.size > 1)
    made.close()


def test_memory_that_is_refused_falls_back_on_all_ranks(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shared_memory, "_map", lambda path, total_bytes: None)
    made = comm.duplicate()
    made.group.limits.fast_bytes, made.group.limits.one_shot_bytes = 1, 0
    x = torch.ones(100_000)
    made.all_reduce(x)
    assert made.transport.fast() is None
    assert x.eq(comm.size).all()
    made.close()


@pytest.mark.parametrize("dtype", CHUNKED, ids=str)
def test_chunks(plain, dtype):
    verbs.check_chunks(plain, dtype)


def test_refusals(comm):
    verbs.check_refusals(comm)


def test_agreement_and_objects(comm):
    verbs.check_agreement(comm)


def test_journal(comm):
    verbs.check_journal(comm)


def test_started(comm):
    verbs.check_started(comm)
