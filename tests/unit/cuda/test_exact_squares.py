"""Exact sums of squares: the kernel, its reference in torch and the host loop agree without any rounding."""

from fractions import Fraction

import pytest
import torch

from mpispeed.native import exact_squares, reduce
from mpispeed.native.cuda.launcher import standing_in
from tests.helpers.cuda_host import HostLauncher

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 15, 255, 256, 257, 5000, 70_001)


def noise(count, dtype, seed=0):
    """Of very different sizes, with zeros and numbers whose squares are below fp32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-60, 12, (count,), generator=generator).double())
    return torch.where(torch.rand(count, generator=generator) < 0.1, torch.zeros_like(x), x).to(dtype)


def exact(partials):
    return sum(map(Fraction, partials), Fraction(0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("count", LENGTHS)
def test_twin_is_the_host_loop(count, dtype):
    x = noise(count, dtype)
    found = exact_squares.square_partials_reference([x], block=256)
    assert exact(found) == exact(reduce.square_partials(x))


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_kernel_is_the_host_loop(dtype, first, is_reversed):
    """Also of slices that begin between two words, and of several tensors at once."""
    parts = [noise(count + first, dtype, count)[first:] for count in LENGTHS]
    with standing_in(HostLauncher(is_reversed=is_reversed)):
        found = exact_squares.square_partials(parts, block=256)
    assert exact(found) == sum((exact(reduce.square_partials(part)) for part in parts), Fraction(0))
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("has_kernel", [False, True])
def test_what_is_not_finite(has_kernel):
    def told(x):
        if not has_kernel:
            return exact_squares.square_partials_reference([x], block=256)
        with standing_in(HostLauncher()):
            return exact_squares.square_partials([x], block=256)

    x = noise(3000, torch.float32)
    x[2999] = -torch.inf
    assert told(x) == [torch.inf]
    x[7] = torch.nan
    assert str(told(x)) == "[nan]"
    assert told(torch.zeros(700)) == []


def test_where_the_buffer_was_cut_changes_nothing():
    x = noise(256 * 40, torch.float32)
    with standing_in(HostLauncher()):
        whole = exact_squares.square_partials([x], block=256)
        cut = exact_squares.square_partials(list(x.split(256 * 7)), block=256)
    assert whole == cut
