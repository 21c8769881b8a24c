"""The global norm with its finite check: kernel and reference, run on the host, against exact sums."""

from __future__ import annotations

import math

import pytest
import torch

from mpispeed.native.cuda import launcher
from mpispeed.native.device_norm import CHUNK, norm_and_finite, norm_and_finite_reference
from tests.helpers.cuda_host import HostLauncher

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [(5, 0), (0, 0), (1031, 3), (CHUNK, 0), (CHUNK + 9, 1), (1, 2), (64, 0)]


def make_tensors(dtypes, sizes=SIZES, scale=1.0):
    source = torch.Generator().manual_seed(3)
    found = []
    for at, (count, offset) in enumerate(sizes):
        x = (torch.randn(count + offset, generator=source) * scale).to(dtypes[at % len(dtypes)])
        found.append(x[offset:])
    return found


def exact(tensors):
    return math.fsum(value * value for x in tensors for value in x.double().tolist())


@pytest.fixture(params=[False, True], ids=["", "reversed"])
def host(request):
    found = HostLauncher(is_reversed=request.param)
    with launcher.standing_in(found):
        yield found


@pytest.mark.parametrize("dtypes", [(F32,), (BF16,), (FP16,), (F32, BF16), (FP16, BF16, F32)], ids=str)
def test_sum_of_squares(host, dtypes):
    tensors = make_tensors(dtypes)
    squares, is_finite = norm_and_finite(tensors)
    assert host.launched[-1] == "square_sum_total"
    assert len(host.launched) == len(dtypes) + 1  # one pass for each dtype, one for the total
    assert (squares.dtype, is_finite.dtype) == (torch.float64, torch.bool)
    assert squares.shape == is_finite.shape == ()
    assert bool(is_finite)
    wanted, count = exact(tensors), sum(x.numel() for x in tensors)
    # Squares are exact in fp64, and every addition rounds once; all terms are positive.
    assert math.isclose(float(squares), wanted, rel_tol=count * 2.0**-53)
    other, finite = norm_and_finite_reference(tensors)
    assert math.isclose(float(other), wanted, rel_tol=count * 2.0**-53)
    assert bool(finite)


def test_bits_depend_neither_on_the_order_of_warps_nor_on_alignment():
    tensors, found = make_tensors((F32, BF16)), set()
    for is_reversed in (False, True):
        for offset in (0, 1, 3):
            moved = [torch.cat([torch.ones(offset, dtype=x.dtype), x])[offset:] for x in tensors]
            with launcher.standing_in(HostLauncher(is_reversed=is_reversed)):
                found.add(float(norm_and_finite(moved)[0]))
    assert len(found) == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [F32, BF16, FP16])
@pytest.mark.parametrize("place", [0, CHUNK + 8])
def test_one_element_that_is_not_finite(host, dtype, value, place):
    tensors = make_tensors((dtype,))
    tensors[4][place] = value
    squares, is_finite = norm_and_finite(tensors)
    assert not bool(is_finite)
    assert not math.isfinite(float(squares))
    assert not bool(norm_and_finite_reference(tensors)[1])


@pytest.mark.parametrize("scale", [3e38, 1e-38])
def test_the_largest_and_the_smallest_numbers(host, scale):
    # Their squares are beyond fp32, so a sum in fp32 would be infinite, or 0.
    tensors = [torch.full((100,), scale)]
    squares, is_finite = norm_and_finite(tensors)
    assert bool(is_finite)
    assert math.isclose(float(squares), exact(tensors), rel_tol=100 * 2.0**-53)


def test_nothing_to_sum(host):
    for tensors in ([], [torch.zeros(0)], [torch.zeros(0), torch.zeros(0, dtype=BF16)]):
        squares, is_finite = norm_and_finite(tensors)
        assert (float(squares), bool(is_finite)) == (0.0, True)


def test_what_kernels_do_not_take_is_left_to_the_twin(host):
    tensors = [torch.full((3,), 1e200, dtype=torch.float64), torch.ones(2)]
    squares, is_finite = norm_and_finite(tensors)
    assert host.launched == []
    assert (float(squares), bool(is_finite)) == (math.inf, True)


def test_tables_follow_their_addresses(host):
    for count in (10, 20, 10):
        tensors = [torch.full((count,), 2.0), torch.full((3,), 1.0)]
        assert float(norm_and_finite(tensors)[0]) == 4 * count + 3


def test_errors():
    with pytest.raises(TypeError, match=r"tensor 1 has dtype torch\.int64"):
        norm_and_finite([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match="tensor 1 is on meta and the first on cpu"):
        norm_and_finite([torch.ones(1), torch.ones(1, device="meta")])
    with pytest.raises(ValueError, match=r"tensor 0 of shape \(2,\) is not dense and contiguous"):
        norm_and_finite([torch.ones(4)[::2]])
