"""Sums over ranks on a device: the kernel, run on the host, and the twin give the bits of the host's tree."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import device_sum
from mpispeed.native.cuda import launcher
from mpispeed.native.reduce import tree_reduce, tree_sum
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import has_same_bits

HALVES = (torch.bfloat16, torch.float16)
PAIRS = [(torch.float32, torch.float32), *((x, x) for x in HALVES), *((x, torch.float32) for x in HALVES)]
COUNTS = (0, 1, 8, 1003, 2048 * 3 + 5)


def parts_of(number, count, dtype, offset=0):
    """Of very different sizes, with zeros of both signs, infinities and one that is no number; at odd places too."""
    found = torch.randn(number, count + offset, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    found *= torch.logspace(-3, 3, number, dtype=torch.float64)[:, None]
    if count > 8:
        found[0, -1], found[-1, -2], found[:, -3], found[:, -4] = float("inf"), float("nan"), -0.0, 0.0
    return [row[offset:] for row in found.to(dtype)]


def same(found, expected):
    """To the bit, but for the payload of what is no number, which processors choose."""
    settled = [torch.where(x.isnan(), 0.5, x) for x in (found, expected)]
    return torch.equal(found.isnan(), expected.isnan()) and has_same_bits(*settled)


@pytest.mark.parametrize("is_reversed", [False, True], ids=["forward", "reversed"])
@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS, ids=str)
def test_the_bits_are_those_of_the_host(dtype, out_dtype, is_reversed):
    kernels = HostLauncher(is_reversed=is_reversed)
    for number in range(1, 10):
        for count in COUNTS if number in (3, 8) else COUNTS[-2:-1]:
            for scale, offset in ((1.0, 0), (1 / 3, 1)):
                parts = parts_of(number, count, dtype, offset)
                expected, twin, out = (torch.full((count + offset,), 7, dtype=out_dtype)[offset:] for _ in range(3))
                tree_sum(expected, parts, scale=scale)
                device_sum.combine_reference(twin, parts, "sum", scale)
                assert same(twin, expected)
                before = len(kernels.launched)
                with launcher.standing_in(kernels):
                    device_sum.combine(out, parts, "sum", scale)
                assert same(out, expected)
                assert len(kernels.launched) - before == (number <= device_sum.MOST_PARTS and count > 0)


def test_the_result_may_be_one_of_the_parts():
    for dtype in (torch.float32, *HALVES):
        parts = parts_of(4, 1003, dtype)
        expected = torch.empty(1003, dtype=dtype)
        tree_sum(expected, parts)
        with launcher.standing_in(HostLauncher()):
            device_sum.combine(parts[2], parts, "sum")
        assert same(parts[2], expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_and_operations_are_torch_s(dtype):
    ops = ["sum", "prod", "min", "max", *(["band", "bor", "bxor"] if not dtype.is_floating_point else [])]
    parts = [(x * 100).clamp(0, 200).to(dtype) for x in torch.randn(3, 1003, dtype=torch.float64).unbind()]
    kernels = HostLauncher()
    for op in ops:
        expected, out = torch.empty(1003, dtype=dtype), torch.empty(1003, dtype=dtype)
        tree_reduce(expected, parts, op)
        with launcher.standing_in(kernels):
            device_sum.combine(out, parts, op)
        assert has_same_bits(out, expected), op
