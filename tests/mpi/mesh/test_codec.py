"""Quantized gathers and reductions over MPI, on any number of ranks."""

import pytest
import torch

from mpispeed.mesh.compressed.quantized import quantized_all_gather
from tests.helpers import codec

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_gathers(world, dtype):
    codec.check_gathers(world, dtype)


@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_gathers_through_groups(world, dtype):
    codec.check_gathers_through(world, dtype)


@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_reductions(world, dtype):
    codec.check_reductions(world, dtype)


def test_feedback_takes_the_bias_away(world):
    codec.check_feedback(world)


def test_feedback_handling(world):
    codec.check_feedback_handling(world)


def test_many_messages_and_shared_memory(comm):
    count = 20_000
    shard = codec.gradient(comm.rank, count)
    results = []
    for limit in ("chunk_bytes", "fast_bytes", None):
        made, out = comm.duplicate(), torch.zeros(comm.size * count)
        if limit:
            setattr(made.group.limits, limit, 4096)
        quantized_all_gather(made, out, shard, block=256)
        results.append(out)
        made.close()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_started(comm):
    count = 3000
    shard = codec.gradient(comm.rank, count)
    out, plain = torch.zeros(comm.size * count), torch.zeros(comm.size * count)
    quantized_all_gather(comm, plain, shard, block=256)
    works = [comm.start(lambda c: quantized_all_gather(c, out, shard, block=256)) for _ in range(2)]
    for work in works:
        work.wait()
    assert torch.equal(out, plain)
