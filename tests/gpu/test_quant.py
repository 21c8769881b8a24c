"""Block codes of a GPU are the bytes of the host loops."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import block_quant as bq
from mpispeed.native.codes import Coded, Grid
from tests.helpers.codes import FLOATS, dirty, moved, plain, same, same_coded, shifted, ties, tiny, untouched, wild

GRIDS = [
    Grid(256 * 300, 256, 2),
    Grid(1000, 256, 3),
    Grid(257, 512),
    Grid(70_001, 1024, 2),
    Grid(1 << 18, 2048, 4),
    Grid(100_000, 4096),
    Grid(123_456, 8192, 3),
    Grid(1, 256, 2),
    Grid(200_001, 65_536),
    Grid(0, 256),
]


def make_error(grid):
    error = Coded.zeros(grid, 8)
    bq.quantize(error, plain(grid.numel, seed=2) * 0.05, grid)
    return error


def make_parts(grid, bits, number, make=plain):
    parts = [Coded.zeros(grid, bits) for _ in range(number)]
    for seed, part in enumerate(parts):
        bq.quantize(part, make(grid.numel, seed=seed), grid)
    return parts


def check_quantize(device, x, grid, bits, offset=0):
    host, ours = dirty(grid, bits), dirty(grid, bits, offset, device)
    bq.quantize(host, x, grid)
    bq.quantize(ours, shifted(x, offset, device), grid)
    assert same_coded(ours, host), (grid, bits, offset)
    assert all(untouched(y, offset) for y in ours)
    host, ours, errors = dirty(grid, bits), dirty(grid, bits, offset, device), [make_error(grid)]
    errors.append(moved(errors[0], offset, device))
    bq.quantize(host, x, grid, error=errors[0], beta=0.8)
    bq.quantize(ours, shifted(x, offset, device), grid, error=errors[1], beta=0.8)
    assert same_coded(ours, host), (grid, bits, offset)
    assert same_coded(errors[1], errors[0]), (grid, bits, offset)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [plain, wild])
def test_quantize_gives_the_bytes_of_the_host(device, make, dtype, bits):
    for i, grid in enumerate(GRIDS):
        check_quantize(device, make(grid.numel, dtype), grid, bits, i % 3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", [ties, tiny])
def test_quotients_at_halves_and_near_the_smallest_numbers(device, make, bits):
    for seed in range(8):
        check_quantize(device, make(1 << 20, seed=seed), Grid(1 << 20, 256), bits)
    check_quantize(device, ties(1 << 20, powers=(-126, -118)), Grid(1 << 20, 256), bits)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_dequantize_and_sums_give_the_bits_of_the_host(device, bits, dtype):
    for i, grid in enumerate(GRIDS):
        for number, make in ((1, wild), (2, plain), (7, plain), (130, plain) if grid.numel < 3000 else (3, wild)):
            parts = make_parts(grid, bits, number, make)
            there = [moved(part, i % 2, device) for part in parts]
            host = torch.empty(grid.numel, dtype=dtype)
            ours = shifted(host, i % 2, device)
            bq.dequantize_sum(host, parts, grid, scale=1 / 3)
            bq.dequantize_sum(ours, there, grid, scale=1 / 3)
            assert same(ours, host), (grid, number)
            bq.dequantize_add(host, parts[0], grid)
            bq.dequantize_add(ours, there[0], grid)
            assert same(ours, host), (grid, number)
            assert untouched(ours, i % 2)


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)])
def test_sums_are_coded_again_as_on_the_host(device, bits):
    for i, grid in enumerate(GRIDS):
        parts = make_parts(grid, bits[0], 3, wild if i == 3 else plain)
        there = [moved(part, i % 2, device) for part in parts]
        for has_error in (False, True):
            host, ours = dirty(grid, bits[1]), dirty(grid, bits[1], i % 2, device)
            errors = [make_error(grid), moved(make_error(grid), 0, device)] if has_error else [None, None]
            bq.sum_requantize(host, parts, grid, error=errors[0], beta=0.5)
            bq.sum_requantize(ours, there, grid, error=errors[1], beta=0.5)
            assert same_coded(ours, host), grid
            assert not has_error or same_coded(*errors)


def test_the_twin_on_the_device_gives_the_bytes_too(device):
    grid = Grid(10_001, 1024, 2)
    x = plain(grid.numel).to(device)
    ours, reference = dirty(grid, 4, 0, device), dirty(grid, 4, 0, device)
    bq.quantize(ours, x, grid)
    bq.quantize_reference(reference, x, grid)
    assert same_coded(ours, reference)


def test_more_than_2_to_the_31_elements(device):
    """Bytes of the last elements, which 32-bit numbers would put elsewhere."""
    count = (1 << 31) + (1 << 20)
    free, _ = torch.cuda.mem_get_info(device)
    if free < 5 * count:
        pytest.skip(f"needs {5 * count} bytes of device memory, {free} are free")
    grid, tail = Grid(count, 4096), 1 << 20
    x = torch.ones(count, dtype=torch.bfloat16, device=device)
    last = plain(tail, torch.bfloat16)
    x[-tail:] = last.to(device)
    coded, host = Coded.zeros(grid, 8, device), Coded.zeros(Grid(tail, 4096), 8)
    bq.quantize(coded, x, grid)
    bq.quantize(host, last, Grid(tail, 4096))
    assert torch.equal(coded.codes[-tail:].cpu(), host.codes)
    assert coded.codes[:-tail].eq(127).all()
    x.zero_()
    bq.dequantize(x, coded, grid)
    bq.dequantize(last, host, Grid(tail, 4096))
    assert same(x[-tail:], last)
