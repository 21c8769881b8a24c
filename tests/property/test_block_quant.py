"""Block quantizers for arbitrary floats: the error bound, idempotence, independence of threads and cuts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.native.block_quant import block_count, default_block, dequantize, quantize
from mpispeed.native.codes import Coded, Grid

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BITS = st.sampled_from([8, 4])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def code(x, grid, bits, threads=1):
    coded = Coded.zeros(grid, bits)
    quantize(coded, x, grid, threads=threads)
    return coded


def value(coded, grid, dtype=torch.float32):
    out = torch.empty(grid.numel, dtype=dtype)
    dequantize(out, coded, grid)
    return out


@given(st.lists(FINITE, min_size=1, max_size=600), BITS)
def test_error_is_bounded(values, bits):
    x, grid = torch.tensor(values), Grid(len(values), 256)
    coded = code(x, grid, bits)
    back = value(coded, grid)
    for part, found, scale in zip(x.split(256), back.split(256), coded.scales.tolist(), strict=True):
        bound = max(scale, 2.0**-126) / 2 + part.abs().max().item() * 2.0**-23
        assert ((part.double() - found.double()).abs() <= bound).all()


@given(st.lists(FINITE, min_size=1, max_size=600), BITS, DTYPES)
def test_quantizing_again_changes_nothing(values, bits, dtype):
    top = torch.finfo(dtype).max
    x, grid = torch.tensor(values).clamp(-top, top).to(dtype), Grid(len(values), 256)
    first = code(x, grid, bits)
    back = value(first, grid, dtype)
    again = code(back, grid, bits)
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.scales, again.scales)
    assert torch.equal(value(again, grid, dtype), back)


@given(st.integers(0, 2**32), st.integers(1, 40_000), st.integers(0, 100), st.sampled_from([256, 768]), BITS)
def test_cuts_at_blocks_and_threads_change_nothing(seed, count, cut, block, bits):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    whole = code(x, Grid(count, block), bits)
    two = code(x, Grid(count, block), bits, threads=2)
    at = min(cut * block, count // block * block)
    parts = [code(part, Grid(part.numel(), block), bits) for part in (x[:at], x[at:])]
    for i in range(2):
        assert torch.equal(whole[i], two[i])
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))


@given(st.integers(1, 2**40))
def test_blocks_of_any_count(count):
    blocks, block = block_count(count), default_block(count)
    assert block % 256 == 0
    assert 256 <= block <= 8192
    if count % 8 == 0:
        assert count % (8 * blocks) == 0
        assert count <= 8000 * blocks
    assert -(-count // block) <= blocks
