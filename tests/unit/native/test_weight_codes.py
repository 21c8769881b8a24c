"""Matrices as codes: bits of the compiled loops beside their twins, formats, corners, and products by every way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.native import block_quant, status
from mpispeed.native import weight_codes as wc
from mpispeed.native.codes import Coded, Grid

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def values(weight, dtype=torch.float32):
    out = torch.empty(weight.rows, weight.width, dtype=dtype)
    wc.dequantize(out, weight)
    return out


@pytest.fixture
def module():
    """The compiled loops, back at their level afterwards."""
    loops = status.require("weight_codes")
    before = loops.vector_level()
    yield loops
    loops.set_vector_level(before)


def levels_of(loops):
    return [level for level in (1, 3, 4) if level <= loops.best_vector_level()]


@st.composite
def cases(draw):
    bits = draw(st.sampled_from([8, 4]))
    group = draw(st.sampled_from([2, 8, 16, 18, 32, 34, 64, 128, 130, 256, 300]))
    return (
        draw(st.integers(1, 40)), draw(st.integers(1, 400)), group, bits, draw(st.booleans()), draw(st.integers(1, 9)),
        draw(st.sampled_from(FLOATS)), draw(st.booleans()), draw(st.integers(0, 2**31)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(cases())
def test_products_and_values_have_the_bits_of_their_twins(case):
    rows, width, group, bits, is_symmetric, count, dtype, has_bias, seed = case
    loops = status.require("weight_codes")
    weight = wc.encode(randn(rows, width, seed=seed), bits, group, is_symmetric=is_symmetric)
    x = randn(count, width, seed=seed + 1, dtype=dtype)
    bias = randn(rows, seed=seed + 2, dtype=dtype) if has_bias else None
    wanted, found = torch.empty(2, count, rows, dtype=dtype)
    wc.multiply_reference(wanted, x, weight, bias)
    before = loops.vector_level()
    try:
        for level in levels_of(loops):
            loops.set_vector_level(level)
            wc.multiply(found.fill_(torch.nan), x, weight, bias, threads=2)
            assert torch.equal(found, wanted), level
    finally:
        loops.set_vector_level(before)
    plain = torch.empty(rows, width, dtype=dtype)
    wc.dequantize_reference(plain, weight)
    assert torch.equal(values(weight, dtype), plain)


@pytest.mark.parametrize("bits", [8, 4])
def test_bits_depend_neither_on_threads_nor_on_the_number_of_rows(bits, module):
    weight = wc.encode(randn(1000, 300), bits, 64, is_symmetric=False)
    x = randn(11, 300, seed=1)
    wanted, found = torch.empty(2, 11, 1000)
    wc.multiply(wanted, x, weight, threads=1)
    for threads in (2, 3, 7):
        wc.multiply(found.zero_(), x, weight, threads=threads)
        assert torch.equal(found, wanted)
    for m in range(11):
        wc.multiply(found[:1], x[m : m + 1], weight, threads=2)
        assert torch.equal(found[0], wanted[m])
    one, two = torch.empty(1000, 300), torch.empty(1000, 300)
    wc.dequantize(one, weight, threads=1)
    wc.dequantize(two, weight, threads=3)
    assert torch.equal(one, two)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [256, 500, 1001])
def test_symmetric_codes_are_the_block_codes(bits, width):
    x = randn(7, width)
    weight = wc.encode(x, bits, 256)
    grid = Grid(width, 256, 7)
    coded = Coded.zeros(grid, bits)
    block_quant.quantize(coded, x.view(-1), grid)
    assert torch.equal(weight.codes.view(-1), coded.codes) and torch.equal(weight.scales.view(-1), coded.scales)
    found = torch.empty(7 * width)
    assert wc.is_block_code(weight) and not wc.is_block_code(weight._replace(group=64))
    block_quant.dequantize(found, *wc.block_code(weight))
    assert torch.equal(found.view(7, width), values(weight))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_error_of_normal_numbers_in_groups_of_64(bits, is_symmetric, dim, dtype):
    x = randn(128, 192, dtype=dtype)
    weight = wc.encode(x, bits, 64, dim=dim, is_symmetric=is_symmetric)
    error = (values(weight) - x.float()).abs()
    assert error.mean() < 0.15 and error.max() < 0.5
    groups = (x if dim else x.t()).float().reshape(-1, 64)
    step = groups.abs().amax(1) / (127 if bits == 8 else 7) if is_symmetric else (
        (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
    )  # fmt: skip
    by_group = (error if dim else error.t()).reshape(-1, 64).amax(1)
    assert (by_group <= step * 0.5001 + 1e-6).all()  # half a step, and roundings of the quotient and the product


@pytest.mark.parametrize("bits", [8, 4])
def test_offsets_span_the_values_of_a_group(bits):
    x = randn(3, 64) * 0.01 + 5.0
    found = values(wc.encode(x, bits, 64, is_symmetric=False))
    assert (found - x).abs().max() <= (x.max(1).values - x.min(1).values).max() / (2**bits - 1) * 0.51
    assert torch.allclose(found.amin(1), x.amin(1)) and torch.allclose(found.amax(1), x.amax(1))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_corners(bits, is_symmetric):
    x = torch.zeros(6, 32)
    x[1], x[2], x[3], x[4, 3], x[5, 7] = 2.5, -1.0, 1e-42, torch.inf, torch.nan
    found = values(wc.encode(x, bits, 32, is_symmetric=is_symmetric))
    assert torch.equal(found[:3], x[:3])
    assert found[3].abs().max() <= 1e-41
    assert found[4:].isnan().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_and_picked_rows_are_those_of_the_whole(bits, dim):
    weight = wc.encode(randn(50, 77), bits, 10, dim=dim, is_symmetric=False)
    whole = values(weight)
    assert torch.equal(values(weight.part(20, 45)), whole[20:45])
    index = torch.tensor([3, 3, 49, 0, 31])
    assert torch.equal(values(weight.pick(index)), whole[index])


def bound(x, whole):
    """Twice the rounding of a sum of products in fp32, whatever its order."""
    return 2 * whole.shape[1] * torch.finfo(torch.float32).eps * (x.abs().double() @ whole.abs().double().t())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 16, 17, 40])
def test_linear_by_every_way_is_the_product_with_the_values(bits, dim, count, monkeypatch):
    monkeypatch.setattr(wc, "PANEL", 100 * 32)
    weight = wc.encode(randn(90, 100), bits, 16, dim=dim, is_symmetric=False)
    x, bias, whole = randn(count, 100, seed=1), randn(90, seed=2), values(weight)
    wanted = x.double() @ whole.double().t() + bias.double()
    found = wc.linear(x.view(count, 1, 100), weight, bias)
    assert found.shape == (count, 1, 90)
    assert ((found[:, 0].double() - wanted).abs() <= bound(x, whole) + 1e-6).all()


@pytest.mark.parametrize("count", [2, 30])
def test_linear_in_half_precision(count):
    weight, bias = wc.encode(randn(90, 128), 4, 64), randn(90, seed=2)
    for dtype in (torch.bfloat16, torch.float16):
        x = randn(count, 128, seed=1, dtype=dtype)
        found = wc.linear(x, weight, bias)
        assert found.dtype == dtype
        wanted = F.linear(x.float(), values(weight), bias)
        # panels round the weight to 16 bits too
        assert (found.float() - wanted).abs().max() < 4 * torch.finfo(dtype).eps * wanted.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert wc.linear(randn(count, 128), weight, bias).dtype == torch.bfloat16


def test_other_dtypes_and_layouts():
    weight = wc.encode(randn(20, 64), 8, 32)
    x = randn(64, 3, seed=1).t()
    assert torch.equal(wc.linear(x, weight), wc.linear(x.contiguous(), weight))
    assert wc.linear(x.double(), weight).dtype == torch.float64
    assert wc.linear(x[0], weight).shape == (20,)
    meta = wc.encode(randn(20, 64).to("meta"), 4, 32, is_symmetric=False)
    assert meta.codes.shape == (20, 32) and meta.codes.is_meta and meta.offsets.shape == (20, 2)
    assert wc.linear(x.to("meta"), meta).shape == (3, 20)


def test_gradients_of_inputs():
    weight, bias = wc.encode(randn(20, 64), 4, 32), torch.nn.Parameter(randn(20))
    x, y = randn(5, 64, seed=1).requires_grad_(), randn(5, 64, seed=1).requires_grad_()
    wc.linear(x, weight, bias).square().sum().backward()
    grad, bias.grad = bias.grad, None
    F.linear(y, values(weight), bias).square().sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(grad, bias.grad)


def test_without_compiled_loops(monkeypatch):
    weight, x = wc.encode(randn(30, 100), 4, 64), randn(2, 100, seed=1)
    compiled, whole = wc.linear(x, weight), values(weight)
    monkeypatch.setattr(status, "compiled", lambda name: None)
    found, plain = torch.empty(2, 30), torch.empty(30, 100)
    wc.multiply(found, x, weight)
    wc.dequantize(plain, weight)
    assert torch.equal(found, compiled) and torch.equal(plain, whole)
    assert (wc.linear(x, weight) - compiled).abs().max() <= bound(x, whole).max()


def test_refusals():
    weight = wc.encode(randn(8, 64), 8, 32)
    for arguments, text in (
        ((randn(8, 64), 5, 32), "5 bits"),
        ((randn(8), 8, 32), "matrix of floats"),
        ((randn(8, 64).to(torch.int8), 8, 32), "matrix of floats"),
        ((randn(8, 64), 4, 33), "even groups"),
        ((randn(8, 64), 8, 0), "groups of 0"),
    ):
        with pytest.raises(ValueError, match=text):
            wc.encode(*arguments)
    x, out = randn(2, 64), torch.empty(2, 8)
    for arguments, text in (
        ((out, x[:, :63], weight), "x of shape"),
        ((out[:, :7], x, weight), "out of shape"),
        ((out, x, weight, randn(9)), "bias of shape"),
        ((out, x.double(), weight), "float64"),
        ((out, x.half(), weight), "the same for all"),
        ((out, x, weight._replace(scales=weight.scales.half())), "fp32"),
        ((out, x, weight._replace(codes=weight.codes.t().contiguous().t())), "contiguous"),
        ((out, x, wc.encode(randn(8, 64), 8, 4, dim=0)), "along columns"),
    ):
        with pytest.raises(ValueError, match=text):
            wc.multiply(*arguments)
    with pytest.raises(ValueError, match="threads is 0"):
        wc.multiply(out, x, weight, threads=0)
    with pytest.raises(ValueError, match="x of shape"):
        wc.linear(randn(2, 63), weight)
    with pytest.raises(ValueError, match="vector level 2"):
        status.require("weight_codes").set_vector_level(2)
