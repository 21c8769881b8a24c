"""The one-bit mean over MPI, on any number of ranks."""

import pytest
import torch

from mpispeed.mesh.compressed.onebit import OneBitErrors, compressed_all_reduce
from tests.helpers import onebit_codec
from tests.zoo import same_bits

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2)
def test_golden_vector(world, monkeypatch):
    onebit_codec.check_golden(world, monkeypatch)


def test_random_cases(world):
    onebit_codec.check_random_cases(world)


@pytest.mark.parametrize(
    ("piece", "dtype"), [(256, torch.float32), (768, torch.bfloat16), (4096, torch.float16)], ids=str
)
def test_pieces(world, monkeypatch, piece, dtype):
    onebit_codec.check_pieces(world, monkeypatch, piece, dtype)


def test_groups_of_a_mesh(world):
    onebit_codec.check_axes(world)


def test_the_mean_of_many_comes_close(world):
    onebit_codec.check_feedback(world)


def test_refusals(world):
    onebit_codec.check_refusals(world)


def test_not_finite(world):
    onebit_codec.check_not_finite(world)


@pytest.mark.parametrize("dtype", onebit_codec.DTYPES, ids=str)
def test_through_nodes(world, dtype):
    onebit_codec.check_through(world, dtype)


def test_many_messages_and_groups_over_a_network(comm):
    count, results = 20_001, []
    for limit in (None, "chunk_bytes", "far"):
        made, errors = comm.duplicate(), OneBitErrors.zeros(count, comm.size)
        if limit == "chunk_bytes":
            made.group.limits.chunk_bytes = 1000
        made.transport.shares_memory = limit != "far"
        for turn in range(2):
            x = onebit_codec.values(comm.rank, count, seed=turn)
            compressed_all_reduce(made, x, errors)
        results.append((x, errors.worker, errors.server))
        made.close()
    for other in results[1:]:
        same_bits(results[0], other)


@pytest.mark.parametrize("overlapped", [False, True])
def test_started(comm, overlapped, monkeypatch):
    monkeypatch.setattr("mpispeed.mesh.compressed.onebit.PIECE_ELEMENTS", 512)
    count = 3000 * comm.size
    buffers = [onebit_codec.values(comm.rank, count, seed=seed) for seed in range(2)]
    plain = [x.clone() for x in buffers]
    errors, plain_errors = ([OneBitErrors.zeros(count, comm.size) for _ in range(2)] for _ in range(2))
    for x, kept in zip(plain, plain_errors, strict=True):
        compressed_all_reduce(comm, x, kept, overlapped=overlapped)
    works = [
        comm.start(lambda c, x=x, kept=kept: compressed_all_reduce(c, x, kept, overlapped=overlapped))
        for x, kept in zip(buffers, errors, strict=True)
    ]
    for work in works:
        work.wait()
    same_bits(buffers, plain)
