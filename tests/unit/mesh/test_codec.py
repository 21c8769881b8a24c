"""Quantized gathers and reductions on simulated ranks, byte formulas, refusals."""

import math

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import sim, solo_comm
from mpispeed.mesh.compressed.quantized import (
    Feedback,
    quantized_all_gather,
    quantized_gather_through,
    quantized_reduce_scatter,
)
from mpispeed.native.codes import Coded, Grid
from tests.helpers import codec

SIZES = (1, 2, 3, 4, 6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_gathers(size, dtype):
    sim.run(size, lambda world: codec.check_gathers(world, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_gathers_through_groups(size, dtype):
    sim.run(size, lambda world: codec.check_gathers_through(world, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", codec.DTYPES, ids=str)
def test_reductions(size, dtype):
    sim.run(size, lambda world: codec.check_reductions(world, dtype))


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_feedback_takes_the_bias_away(size):
    sim.run(size, codec.check_feedback)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_feedback_handling(size):
    sim.run(size, codec.check_feedback_handling)


def test_bytes_are_those_of_the_theory():
    # shards of 2^20 elements on 8 ranks: half and a quarter of what 16-bit floats take, and 4 bytes per 4096
    count, block = 2**20, 4096
    assert codec.gather_bytes(count, [8], block) == (7 * (count + 4 * 256),)
    assert sum(codec.gather_bytes(count, [2, 4], block)) == 7 * (count + 4 * 256)
    assert codec.reduce_scatter_bytes(count, 4, 2, block) == (3 * 2 * (count // 2 + 1024), count // 2 + 1024)
    assert codec.reduce_scatter_bytes(count, 1, 1, block) == (0, 0)


def test_gathers_mix_dtypes():
    def fn(world):
        out = torch.empty(2 * 100, dtype=torch.bfloat16)
        quantized_all_gather(world.comm, out, codec.gradient(world.rank, 100), block=256)
        return out

    first, second = sim.run(2, fn)
    wanted = [torch.from_numpy(codec.coded(codec.gradient(r, 100).numpy(), 127, 256)[0]) for r in range(2)]
    assert torch.equal(first, torch.cat(wanted).bfloat16())
    assert torch.equal(first, second)


def test_empty_shards():
    def fn(world):
        quantized_all_gather(world.comm, torch.empty(0), torch.empty(0), block=256)
        quantized_reduce_scatter(world.comm, solo_comm(), torch.empty(0), torch.empty(0), block=256)

    sim.run(2, fn)


def test_refusals():
    solo = solo_comm()
    x = torch.ones(512)
    with pytest.raises(CommError, match="out has 512 elements, 1 shards of 256"):
        quantized_all_gather(solo, x, torch.ones(256), block=256)
    with pytest.raises(CommError, match="full has 512 elements, 1 shards of 256"):
        quantized_reduce_scatter(solo, solo, torch.ones(256), x, block=256)
    with pytest.raises(CommError, match="blocks of 100 elements"):
        quantized_all_gather(solo, x.clone(), x, block=100)
    with pytest.raises(CommError, match=r"dtype torch\.float64"):
        quantized_all_gather(solo, x.double(), x, block=256)
    with pytest.raises(CommError, match="contiguous"):
        quantized_all_gather(solo, x[::2], torch.ones(256), block=256)
    with pytest.raises(CommError, match="no groups"):
        quantized_gather_through([], x, x, block=256)


def test_feedback_arguments():
    for beta in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="beta is"):
            Feedback(beta=beta)
    with pytest.raises(ValueError, match="reset_after is 0"):
        Feedback(reset_after=0)
    for factor in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="factor is"):
            Feedback().rescale(factor)
    feedback = Feedback()
    grid = Grid(100, 256)
    assert isinstance(feedback.error("first", grid), Coded)
    with pytest.raises(CommError, match="belongs to one buffer"):
        feedback.error("first", Grid(200, 256))
