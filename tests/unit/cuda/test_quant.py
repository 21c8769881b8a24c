"""Block codes of the kernels, run on the host, are the bytes of the host loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mpispeed.native import block_quant as bq
from mpispeed.native import device_quant, status
from mpispeed.native.codes import Coded, Grid
from mpispeed.native.cuda import launcher
from tests.helpers.codes import FLOATS, dirty, moved, plain, same, same_coded, shifted, ties, tiny, untouched, wild
from tests.helpers.cuda_host import HostLauncher

# One warp for a block, a thread block for one, several looks at one; whole packets and not; several pieces.
GRIDS = [
    Grid(256 * 3, 256, 2),
    Grid(1000, 256, 3),
    Grid(257, 512),
    Grid(2049, 1024, 2),
    Grid(5000, 4096),
    Grid(1, 256, 2),
    Grid(8191, 65536),
]
LONG = [Grid(20_008, 16_384), Grid(40_001, 65_536)]


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def kernels(request):
    return HostLauncher(is_reversed=request.param)


def make_error(grid, seed=2):
    error = Coded.zeros(grid, 8)
    bq.quantize(error, plain(grid.numel, seed=seed) * 0.05, grid)
    return error


def make_parts(grid, bits, number, make=plain):
    parts = [Coded.zeros(grid, bits) for _ in range(number)]
    for seed, part in enumerate(parts):
        bq.quantize(part, make(grid.numel, seed=seed), grid)
    return parts


def run_quantize(kernels, x, grid, bits, offset, error=None):
    """By the host loop, and by the kernel on unaligned tensors."""
    host, ours = dirty(grid, bits), dirty(grid, bits, offset)
    kept = (None, None) if error is None else (moved(error), moved(error, offset))
    bq.quantize(host, x, grid, error=kept[0], beta=0.8 if error else 0.0)
    before = len(kernels.launched)
    with launcher.standing_in(kernels):
        bq.quantize(ours, shifted(x, offset), grid, error=kept[1], beta=0.8 if error else 0.0)
    assert len(kernels.launched) == before + 1
    assert same_coded(ours, host), (grid, bits, offset)
    assert all(untouched(y, offset) for y in ours)
    if error is not None:
        assert same_coded(kept[1], kept[0]), (grid, bits, offset)
        assert all(untouched(y, offset) for y in kept[1])


def test_the_host_loops_are_there():
    assert status.compiled("block_quant") is not None


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantize_gives_the_bytes_of_the_host(kernels, dtype, bits):
    for i, grid in enumerate(GRIDS):
        for make in (plain, wild):
            run_quantize(kernels, make(grid.numel, dtype), grid, bits, i % 2)
    run_quantize(kernels, wild(1024, dtype), Grid(1024, 1024), bits, 1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_kept_error_is_that_of_the_host(kernels, dtype, bits):
    for i, grid in enumerate(GRIDS):
        run_quantize(kernels, (plain, wild)[i % 2](grid.numel, dtype), grid, bits, i % 3, make_error(grid))


@pytest.mark.parametrize("make", [plain, wild])
def test_blocks_that_do_not_fit_registers_are_read_again(kernels, make):
    for grid in LONG:
        run_quantize(
            kernels, make(grid.numel, torch.bfloat16, special=0) if make is wild else make(grid.numel), grid, 4, 0
        )
        run_quantize(kernels, make(grid.numel), grid, 8, 0, make_error(grid))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", [ties, tiny])
def test_quotients_at_halves_and_near_the_smallest_numbers(make, bits):
    for seed in range(4):
        run_quantize(HostLauncher(), make(1 << 14, seed=seed), Grid(1 << 14, 256), bits, 0)


def test_quotients_whose_remainders_are_denormals():
    for seed in range(4):
        x = ties(1 << 15, seed=seed, powers=(-126, -118))
        run_quantize(HostLauncher(), x, Grid(x.numel(), 256), 8, 0)


def hardest_quotients(levels):
    """Scales and values whose quotient lies next to the middle between a half and the next float, from either side.

    With M, S, V the integers of the middle, the scale and the value, V 2^24 - M S = d: the smaller d, the nearer, and
    there is one S for each. Larger d than 8 are further away than the kernel's quotient may be off.
    """
    found = []
    for half in (k + 0.5 for k in range(levels)):
        for after in (math.inf, -math.inf):
            middle = (half + float(np.nextafter(np.float32(half), np.float32(after)))) / 2
            mantissa, power = math.frexp(middle)
            whole = int(mantissa * 2**25)
            whole, power = (whole, power - 25) if whole % 2 else (whole // 2, power - 24)
            if whole % 2 == 0:
                continue
            for distance in (d for near in range(1, 9) for d in (near, -near)):
                scale = -distance * pow(whole, -1, 2**24) % 2**24
                value = math.ldexp(whole * scale + distance, power)
                if scale >= 2**23 and float(np.float32(value)) == value:
                    found.append((float(scale), value))
    return found


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_quotients_nearest_to_where_they_would_be_rounded_to_another_integer(bits, levels):
    blocks = []
    for scale, value in hardest_quotients(levels):
        peak = np.float32(scale * levels)
        for near in (peak, np.nextafter(peak, np.float32(0)), np.nextafter(peak, np.float32(np.inf))):
            if near / np.float32(levels) == np.float32(scale):
                blocks.append([float(near), value, -value, *[0.0] * 253])
                break
    assert len(blocks) > levels
    for power in (-100, 0, 90):  # the first are lifted before
        x = torch.ldexp(torch.tensor(blocks), torch.tensor(power)).view(-1)
        assert x.isfinite().all()
        run_quantize(HostLauncher(), x, Grid(x.numel(), 256), bits, 0)


def test_blocks_of_zeros_infinities_and_nans(kernels):
    x = torch.zeros(6 * 256)
    x[256], x[512], x[768] = torch.inf, torch.nan, -torch.inf
    x[1024:1280] = torch.finfo(torch.float32).max
    x[1280:] = 2.0**-127
    for bits in (8, 4):
        run_quantize(kernels, x, Grid(x.numel(), 256), bits, 0)
        run_quantize(kernels, x, Grid(x.numel(), 256), bits, 0, make_error(Grid(x.numel(), 256)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_dequantize_and_sums_give_the_bits_of_the_host(kernels, bits, dtype):
    for i, grid in enumerate(GRIDS):
        offset = i % 2
        for number, make in ((1, wild), (2, plain), (5, plain)):
            parts = make_parts(grid, bits, number, make)
            host, ours = torch.empty(grid.numel, dtype=dtype), shifted(torch.empty(grid.numel, dtype=dtype), offset)
            bq.dequantize_sum(host, parts, grid, scale=1 / 3)
            with launcher.standing_in(kernels):
                bq.dequantize_sum(ours, [moved(part, offset) for part in parts], grid, scale=1 / 3)
            assert same(ours, host), (grid, number)
            assert untouched(ours, offset)
        bq.dequantize_add(host, parts[0], grid)
        with launcher.standing_in(kernels):
            bq.dequantize_add(ours, moved(parts[0], offset), grid)
        assert same(ours, host)


@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)])
def test_sums_are_coded_again_as_on_the_host(kernels, bits, has_error):
    for i, grid in enumerate(GRIDS):
        parts = make_parts(grid, bits[0], 3 + i, wild if i == 3 else plain)
        host, ours = dirty(grid, bits[1]), dirty(grid, bits[1], i % 2)
        errors = [make_error(grid), make_error(grid)] if has_error else [None, None]
        bq.sum_requantize(host, parts, grid, error=errors[0], beta=0.5)
        with launcher.standing_in(kernels):
            bq.sum_requantize(ours, [moved(part, i % 2) for part in parts], grid, error=errors[1], beta=0.5)
        assert same_coded(ours, host), grid
        assert not has_error or same_coded(*errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_parts_than_one_launch_takes(monkeypatch, dtype):
    grid, kernels = Grid(700, 256), HostLauncher()
    assert device_quant.MOST_PARTS > 100
    parts = make_parts(grid, 4, 2) * (device_quant.MOST_PARTS // 2 + 2)
    host, ours = torch.empty(2, grid.numel, dtype=dtype)
    coded = [dirty(grid, 8), dirty(grid, 8)]
    bq.dequantize_sum(host, parts, grid, scale=0.01)
    bq.sum_requantize(coded[0], parts, grid)
    with launcher.standing_in(kernels):
        bq.dequantize_sum(ours, parts, grid, scale=0.01)
        bq.sum_requantize(coded[1], parts, grid)
    assert same(ours, host)
    assert same_coded(*coded)
    assert len(kernels.launched) > 4


def test_nothing_is_launched_for_nothing():
    kernels, grid = HostLauncher(), Grid(0, 256, 2)
    coded = Coded.zeros(grid, 8)
    with launcher.standing_in(kernels):
        bq.quantize(coded, torch.empty(0), grid)
        bq.sum_requantize(coded, [Coded.zeros(grid, 8)], grid)
        bq.dequantize(torch.empty(0), coded, grid)
    assert not kernels.launched


def test_decoded_values_are_within_half_a_level_of_float64(kernels):
    """The bound of the module: half a level, and the roundings of quotient and product."""
    grid = Grid(4096, 1024)
    x = plain(grid.numel)
    for bits, levels in ((8, 127), (4, 7)):
        coded, back = dirty(grid, bits), torch.empty(grid.numel)
        with launcher.standing_in(kernels):
            bq.quantize(coded, x, grid)
            bq.dequantize(back, coded, grid)
        peak = x.double().view(-1, 1024).abs().amax(1, keepdim=True)
        error = (back.double() - x.double()).view(-1, 1024).abs()
        assert (error <= peak / levels / 2 + peak * 2.0**-22).all()


def test_tensors_without_data_beside_others_are_refused():
    grid = Grid(256, 256)
    with pytest.raises(ValueError, match="x is on meta, but another tensor is on cpu"):
        bq.quantize(Coded.zeros(grid, 8), torch.empty(256, device="meta"), grid)
