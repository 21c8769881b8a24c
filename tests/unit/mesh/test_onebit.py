"""The one-bit mean on simulated ranks and nodes, sizes and byte formulas."""

import pytest
import torch

from mpispeed.mesh import sim, solo_comm
from mpispeed.mesh.compressed.onebit import OneBitErrors, compressed_all_reduce, padded_length, sent_bytes
from mpispeed.mesh.compressed.onebit_nodes import compressed_all_reduce_through, mean_inside, shard_length, zero_errors
from tests.helpers import onebit_codec

SIZES = (1, 2, 3, 4, 6)


@pytest.mark.parametrize("size", SIZES)
def test_random_cases(size):
    sim.run(size, lambda world: onebit_codec.check_random_cases(world, 40))


@pytest.mark.parametrize("size", SIZES)
def test_pieces(size, monkeypatch):
    sim.run(size, lambda world: onebit_codec.check_pieces(world, monkeypatch, 512, torch.float32))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [onebit_codec.check_axes, onebit_codec.check_feedback, onebit_codec.check_not_finite])
def test_checks(check, size):
    sim.run(size, check)


@pytest.mark.parametrize("size", (1, 3))
def test_refusals(size):
    sim.run(size, onebit_codec.check_refusals)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", onebit_codec.DTYPES, ids=str)
def test_through_nodes(size, dtype):
    ranks_per_node = 2 if size % 2 == 0 else 1
    sim.run(size, lambda world: onebit_codec.check_through(world, dtype), ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("count", "ranks", "length"),
    [(0, 3, 0), (1, 1, 8), (1, 2, 16), (72, 3, 72), (73, 3, 96), (100, 4, 128), (4096, 64, 4096)],
)
def test_lengths(count, ranks, length):
    assert padded_length(count, ranks) == length
    errors = OneBitErrors.zeros(count, ranks)
    assert (errors.worker.numel(), errors.server.numel()) == (length, length // ranks)
    assert errors.nbytes == 4 * length + 4 * (length // ranks)
    assert sent_bytes(count, ranks) == 2 * (ranks - 1) * (length // (8 * ranks) + 4)


@pytest.mark.parametrize(("count", "inner", "outer"), [(1, 4, 2), (1000, 4, 2), (1024, 8, 4), (77, 1, 3), (77, 3, 1)])
def test_lengths_of_shards(count, inner, outer):
    length = shard_length(count, inner, outer)
    assert length * inner >= count > (length - 8 * outer) * inner
    assert padded_length(length, outer) == length
    assert zero_errors(count, inner, outer).worker.numel() == length


def test_errors_are_fp32_whatever_the_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        errors = OneBitErrors.zeros(10, 2)
    finally:
        torch.set_default_dtype(before)
    assert errors.worker.dtype == errors.server.dtype == torch.float32


def test_a_32nd_of_fp32():
    # 2^26 elements on 8 ranks, beside a ring's 2 (n - 1) / n times 4 bytes each
    assert 2 * 7 * 2**26 * 4 // 8 / sent_bytes(2**26, 8) == pytest.approx(32, rel=1e-5)


def test_shapes_and_empty_buffers():
    solo, x = solo_comm(), torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    flat = x.flatten()
    for y in (x, flat):
        compressed_all_reduce(solo, y, OneBitErrors.zeros(60, 1))
    assert torch.equal(x.flatten(), flat)

    def empty(world):
        compressed_all_reduce(world.comm, torch.empty(0), OneBitErrors.zeros(0, world.size))
        compressed_all_reduce_through(world.comm, solo_comm(), torch.empty(0), zero_errors(0, world.size, 1))

    sim.run(2, empty)


@pytest.mark.parametrize("dtype", onebit_codec.DTYPES, ids=str)
def test_the_mean_inside_is_not_rounded_to_16_bits(dtype):
    def fn(world):
        x = onebit_codec.values(world.rank, 101, dtype)
        before = x.clone()
        shard = mean_inside(world.comm, solo_comm(), x).clone()
        assert torch.equal(x, before)
        return shard

    wanted = sum(onebit_codec.values(rank, 101, dtype).float() for rank in range(2)) / 2
    found = torch.cat(sim.run(2, fn))
    assert found.dtype == torch.float32
    assert torch.equal(found[:101], wanted)
    assert not found[101:].any()
