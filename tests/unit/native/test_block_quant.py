"""Block quantizers: bits of the compiled loops beside the references, error bounds, corners, sizes."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mpispeed.native import block_quant as bq
from mpispeed.native import status
from mpispeed.native.codes import Coded, Grid
from tests.helpers.codes import same, same_coded

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LEVELS = {8: 127, 4: 7}
LENGTHS = [0, 1, 2, 255, 256, 257, 511, 4095, 4097, 70_001]
INCLUDE = Path(__file__).resolve().parents[3] / "cython" / "include"


def make_values(count, dtype=torch.float32, seed=0, spread=1.0):
    """Normal numbers, block by block of another size."""
    source = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(count // 256 + 1, generator=source)).repeat_interleave(256)[:count]
    return (torch.randn(count, generator=source) * sizes).to(dtype)


def make_wild(count, dtype=torch.float32, seed=1):
    """Any bit patterns: subnormals, huge values, infinities and NaNs."""
    source = torch.Generator().manual_seed(seed)
    width = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(width)
    x = torch.randint(info.min, info.max, (count,), generator=source, dtype=torch.int64).to(width).view(dtype)
    return torch.where(x.isfinite() | (torch.rand(count, generator=source) < 0.01), x, 1.0).to(dtype)


def make_error(grid, seed=2):
    error = Coded.zeros(grid, 8)
    bq.quantize(error, make_values(grid.numel, seed=seed) * 0.05, grid)
    return error


def clone(coded):
    return Coded(*(x.clone() for x in coded))


def dirty(grid, bits):
    coded = Coded.zeros(grid, bits)
    coded.codes.fill_(85)
    coded.scales.fill_(-3.0)
    return coded


def unpacked(coded, grid):
    """Codes as Python integers, decoded the plain way."""
    if coded.bits == 8:
        return coded.codes.tolist()
    found = []
    for row in coded.codes.view(grid.pieces, -1).tolist():
        nibbles = [n - 16 if n > 7 else n for byte in row for n in (byte & 15, byte >> 4)]
        assert not any(nibbles[grid.piece :])
        found += nibbles[: grid.piece]
    return found


def test_the_compiled_module_is_the_one_under_test():
    assert status.compiled("block_quant") is not None


@pytest.mark.parametrize(
    ("count", "blocks"),
    [(2**20, 256), (2**18, 64), (8000, 1), (1024, 1), (8, 1), (16000, 2), (0, 0), (8 * 10007, 10007)],
)
def test_block_count_is_the_rule(count, blocks):
    assert bq.block_count(count) == blocks


def test_block_count_by_plain_search():
    for count in range(8, 60_000, 8):
        blocks = -(-count // 8000)
        while count % (8 * blocks):
            blocks += 1
        assert bq.block_count(count) == blocks


@pytest.mark.parametrize(("count", "blocks"), [(1, 1), (2047, 1), (2049, 2), (100_001, 49)])
def test_lengths_the_rule_refuses_get_fixed_blocks(count, blocks):
    assert bq.block_count(count) == blocks
    assert bq.default_block(count) <= bq.FALLBACK_BLOCK


@pytest.mark.parametrize(("count", "block"), [(2**20, 4096), (8000, 8192), (1024, 1024), (0, 256), (8 * 10007, 256)])
def test_default_block_is_a_multiple_of_the_unit(count, block):
    assert bq.default_block(count) == block
    Grid(count, block)


def test_grid_counts():
    grid = Grid(piece=1001, block=256, pieces=3)
    assert (grid.numel, grid.scales, grid.codes(8), grid.codes(4)) == (3003, 12, 3003, 1503)
    assert grid.nbytes(4) == 1503 + 48
    for wrong in ({"block": 100}, {"block": 0}, {"block": 1 << 17}, {"pieces": 0}, {"piece": -1}):
        with pytest.raises(ValueError, match=r"blocks of|pieces of"):
            Grid(**{"piece": 1, "block": 256, "pieces": 1, **wrong})


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_and_scales_are_the_definition(bits):
    grid = Grid(501, 256, 2)
    x = make_values(grid.numel)
    coded = dirty(grid, bits)
    bq.quantize(coded, x, grid)
    codes, scales, at = unpacked(coded, grid), iter(coded.scales.tolist()), 0
    for n in (256, 245, 256, 245):
        block, s = x[at : at + n], next(scales)
        assert s == (block.abs().max() / LEVELS[bits]).item()
        assert codes[at : at + n] == [round(v / s) for v in (block.double()).tolist()]
        at += n


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [make_values, make_wild])
def test_quantize_is_its_twin(make, dtype, bits, threads):
    for count in LENGTHS:
        for pieces, block in ((1, 256), (3, 1024), (1, 65536)):
            grid = Grid(count, block, pieces)
            x = make(grid.numel, dtype)
            ours, reference = dirty(grid, bits), dirty(grid, bits)
            bq.quantize(ours, x, grid, threads=threads)
            bq.quantize_reference(reference, x, grid)
            assert same_coded(ours, reference), (count, pieces, block)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", [make_values, make_wild])
def test_kept_errors_are_the_twins(make, bits, threads):
    for count in (1, 257, 4097, 35_001):
        grid = Grid(count, 512, 2)
        x = make(grid.numel)
        error = make_error(grid)
        twin_error, ours, reference = clone(error), dirty(grid, bits), dirty(grid, bits)
        for _ in range(3):
            bq.quantize(ours, x, grid, error=error, beta=0.8, threads=threads)
            bq.quantize_reference(reference, x, grid, error=twin_error, beta=0.8)
            assert same_coded(ours, reference)
            assert same_coded(error, twin_error)
            assert error.scales.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [make_values, make_wild])
def test_dequantize_is_its_twin(make, dtype, bits, threads):
    for count in LENGTHS:
        for pieces, block in ((1, 256), (3, 2560)):
            grid = Grid(count, block, pieces)
            coded = [Coded.zeros(grid, bits) for _ in range(3)]
            for seed, one in enumerate(coded):
                bq.quantize(one, make(grid.numel, seed=seed), grid)
            start = make_values(grid.numel, dtype)
            for call, reference in (
                (bq.dequantize, bq.dequantize_reference),
                (bq.dequantize_add, bq.dequantize_add_reference),
            ):
                ours, theirs = start.clone(), start.clone()
                call(ours, coded[0], grid, threads=threads)
                reference(theirs, coded[0], grid)
                assert same(ours, theirs)
            for number, scale in ((1, 1.0), (2, 0.3), (3, 1 / 3)):
                ours, theirs = start.clone(), start.clone()
                bq.dequantize_sum(ours, coded[:number], grid, scale=scale, threads=threads)
                bq.dequantize_sum_reference(theirs, coded[:number], grid, scale=scale)
                assert same(ours, theirs)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("bits", "out_bits"), [(8, 8), (4, 4), (8, 4)])
@pytest.mark.parametrize("is_kept", [False, True])
def test_sum_requantize_is_its_twin_and_its_parts(bits, out_bits, is_kept, threads):
    for count in (1, 257, 4097, 35_001):
        grid = Grid(count, 1024, 2)
        parts = [Coded.zeros(grid, bits) for _ in range(3)]
        for seed, part in enumerate(parts):
            bq.quantize(part, make_values(grid.numel, seed=seed), grid)
        errors = [make_error(grid) if is_kept else None for _ in range(3)]
        ours, reference, apart = (dirty(grid, out_bits) for _ in range(3))
        bq.sum_requantize(ours, parts, grid, error=errors[0], beta=0.5, threads=threads)
        bq.sum_requantize_reference(reference, parts, grid, error=errors[1], beta=0.5)
        total = torch.empty(grid.numel)
        bq.dequantize_sum(total, parts, grid)
        bq.quantize(apart, total, grid, error=errors[2], beta=0.5)
        assert same_coded(ours, reference)
        assert same_coded(ours, apart)
        if is_kept:
            assert same_coded(errors[0], errors[1])
            assert same_coded(errors[0], errors[2])


def test_sums_run_in_list_order():
    grid = Grid(256, 256)
    parts = []
    for value in (1e8, 1.0, -1e8):
        parts.append(Coded.zeros(grid, 8))
        bq.quantize(parts[-1], torch.full((256,), value), grid)
    out = torch.empty(256)
    one, two, three = (p.codes.float() * p.scales for p in parts)
    bq.dequantize_sum(out, parts, grid)
    assert torch.equal(out, one + two + three)
    bq.dequantize_sum(out, [parts[0], parts[2], parts[1]], grid)
    assert torch.equal(out, one + three + two)
    assert not torch.equal(one + two + three, one + three + two)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("spread", [1.0, 15.0])
def test_error_is_at_most_half_a_level(bits, spread):
    grid = Grid(50_000, 256)
    x = make_values(grid.numel, spread=spread)
    coded, back = Coded.zeros(grid, bits), torch.empty(grid.numel)
    bq.quantize(coded, x, grid)
    bq.dequantize(back, coded, grid)
    scales = coded.scales.double().repeat_interleave(256)[: grid.numel]
    peaks = torch.stack([b.abs().max() for b in x.split(256)]).double().repeat_interleave(256)[: grid.numel]
    assert ((x.double() - back.double()).abs() <= scales.clamp(min=2.0**-126) / 2 + peaks * 2.0**-23).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_are_exact(bits):
    grid = Grid(600, 256)
    x = torch.zeros(600)
    x[300] = -5.0
    x[10] = -0.0
    coded, back = dirty(grid, bits), torch.full((600,), 9.0)
    bq.quantize(coded, x, grid)
    bq.dequantize(back, coded, grid)
    assert torch.equal(back, x)
    assert coded.scales[0] == coded.scales[2] == 0.0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("peak", [2.0**-149, 2.0**-127, 1.5 * 2.0**-127, 180 * 2.0**-149, 2.0**-126, 6 * 2.0**-126])
def test_tiny_values_stay_within_half_of_the_smallest_scale(bits, peak):
    x = torch.linspace(-peak, peak, 256)
    grid = Grid(256, 256)
    coded, back = dirty(grid, bits), torch.empty(256)
    bq.quantize(coded, x, grid)
    bq.dequantize(back, coded, grid)
    assert coded.scales.item() == 0.0 or coded.scales.item() >= 2.0**-126
    assert ((back.double() - x.double()).abs() <= 2.0**-127).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_value_stays_finite(bits, dtype):
    top = torch.finfo(dtype).max
    grid = Grid(256, 256)
    coded, back = dirty(grid, bits), torch.empty(256, dtype=dtype)
    bq.quantize(coded, torch.full((256,), -top, dtype=dtype), grid)
    bq.dequantize(back, coded, grid)
    assert back.isfinite().all()
    torch.testing.assert_close(back.double(), torch.full((256,), -float(top)).double(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_is_seen(bits, bad):
    grid = Grid(900, 256)
    x = make_values(900)
    x[300] = bad
    error = make_error(grid)
    coded, back = dirty(grid, bits), torch.empty(900)
    bq.quantize(coded, x, grid, error=error, beta=0.8)
    bq.dequantize(back, coded, grid)
    assert back[256:512].isnan().all()
    assert back[:256].isfinite().all()
    assert back[512:].isfinite().all()
    assert not error.codes[256:512].any()
    assert error.scales[1] == 0.0
    assert error.scales[0] > 0.0
    again = dirty(grid, bits)
    bq.sum_requantize(again, [coded, coded], grid)
    assert again.scales.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("bits", [8, 4])
def test_kept_error_is_the_moving_average(bits):
    grid = Grid(256, 256)
    x, error = make_values(256), make_error(grid)
    old, coded, back, kept = torch.empty(256), Coded.zeros(grid, bits), torch.empty(256), torch.empty(256)
    bq.dequantize(old, error, grid)
    bq.quantize(coded, x, grid, error=error, beta=0.75)
    bq.dequantize(back, coded, grid)
    bq.dequantize(kept, error, grid)
    wanted = 0.75 * old + 0.25 * (x + old - back)
    assert (kept - wanted).abs().max() <= 0.5001 * error.scales.item()


def test_twins_run_where_nothing_is_compiled(monkeypatch):
    grid = Grid(1000, 256)
    x, ours, reference = make_values(1000), dirty(grid, 4), dirty(grid, 4)
    out, plain = torch.empty(1000), torch.empty(1000)
    bq.quantize(ours, x, grid)
    bq.dequantize_sum(out, [ours, ours], grid)
    monkeypatch.setattr(status, "compiled", lambda name: None)
    bq.quantize(reference, x, grid)
    bq.dequantize_sum(plain, [reference, reference], grid)
    assert same_coded(ours, reference)
    assert torch.equal(out, plain)
    again, first = dirty(grid, 4), dirty(grid, 4)
    bq.sum_requantize(again, [reference, reference], grid)
    bq.quantize(first, plain, grid)
    assert same_coded(again, first)


def test_wrong_arguments_are_refused():
    grid = Grid(100, 256)
    x, coded = torch.zeros(100), Coded.zeros(grid, 8)
    with pytest.raises(ValueError, match="x has 99 elements, its grid needs 100"):
        bq.quantize(coded, x[:99], grid)
    with pytest.raises(ValueError, match=r"coded\.codes has 50 elements, its grid needs 100"):
        bq.quantize(Coded(coded.codes[:50], coded.scales), x, grid)
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64"):
        bq.quantize(coded, x.double(), grid)
    with pytest.raises(TypeError, match="use int8"):
        bq.quantize(Coded(coded.codes.short(), coded.scales), x, grid)
    with pytest.raises(TypeError, match="error has codes of 4 bits where 8 are needed"):
        bq.quantize(coded, x, grid, error=Coded.zeros(grid, 4))
    with pytest.raises(ValueError, match="strides"):
        bq.quantize(coded, torch.zeros(200)[::2], grid)
    with pytest.raises(ValueError, match="threads is 0"):
        bq.quantize(coded, x, grid, threads=0)
    with pytest.raises(ValueError, match=r"beta is 1\.0"):
        bq.quantize(coded, x, grid, error=Coded.zeros(grid, 8), beta=1.0)
    with pytest.raises(ValueError, match="no parts"):
        bq.dequantize_sum(x, [], grid)
    with pytest.raises(ValueError, match="no parts"):
        bq.sum_requantize(coded, [], grid)
    with pytest.raises(TypeError, match=r"parts\[1\] has codes of 4 bits where 8"):
        bq.dequantize_sum(x, [coded, Coded.zeros(grid, 4)], grid)
    with pytest.raises(ValueError, match="shares memory"):
        bq.sum_requantize(coded, [coded], grid)
    with pytest.raises(ValueError, match="shares memory"):
        bq.dequantize(coded.codes[:96].view(torch.float32)[:24], Coded(coded.codes[:24], coded.scales), Grid(24, 256))
    with pytest.raises(ValueError, match="3 bits"):
        Coded.zeros(grid, 3)


PLAIN = """
#include "block_loops.h"
void run(const void *x, int kind, size_t n, size_t block, int bits, void *codes, float *scales, void *out) {
    mps_encoding e = {{1, n, block}, x, kind, {0, 0, 0, 8}, codes, scales, bits, 0, 0, 0.0f, 0.0f};
    mps_encode(&e, 1);
    const void *c = codes;
    const float *s = scales;
    mps_decoding d = {{1, n, block}, {&c, &s, 1, bits}, out, kind, 0, 1.0f};
    mps_decode(&d, 1);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_plain_loops_give_the_same_bits(tmp_path, dtype):
    (tmp_path / "plain.c").write_text(PLAIN)
    command = ["cc", "-O2", "-DMPISPEED_NO_CLONES", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-I{INCLUDE}"]
    subprocess.run([*command, str(tmp_path / "plain.c"), "-o", str(tmp_path / "plain.so")], check=True)
    run = ctypes.CDLL(str(tmp_path / "plain.so")).run
    word = ctypes.c_size_t
    run.argtypes = [ctypes.c_void_p, ctypes.c_int, word, word, ctypes.c_int, *[ctypes.c_void_p] * 3]
    kinds = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
    for bits in (8, 4):
        for x in (make_values(5001, dtype), make_wild(5001, dtype)):
            grid = Grid(5001, 512)
            ours, plain = dirty(grid, bits), dirty(grid, bits)
            out, plain_out = torch.empty(5001, dtype=dtype), torch.empty(5001, dtype=dtype)
            bq.quantize(ours, x, grid)
            bq.dequantize(out, ours, grid)
            addresses = [t.data_ptr() for t in (plain.codes, plain.scales, plain_out)]
            run(x.data_ptr(), kinds[dtype], 5001, 512, bits, *addresses)
            assert same_coded(ours, plain)
            assert same(out, plain_out)


def test_tensors_without_data_are_checked_alone():
    grid, n = Grid(512, 256, 2), 1024
    x, coded, error = torch.zeros(n, device="meta"), Coded.zeros(grid, 4, "meta"), Coded.zeros(grid, 8, "meta")
    bq.quantize(coded, x, grid, error=error, beta=0.5)
    bq.sum_requantize(coded, [Coded.zeros(grid, 4, "meta") for _ in range(3)], grid)
    bq.dequantize(x, coded, grid)
    bq.dequantize_sum(x, [coded], grid, scale=2.0)
    with pytest.raises(ValueError, match="x has 1023 elements"):
        bq.quantize(coded, x[:-1], grid)
    with pytest.raises(ValueError, match="shares memory"):
        bq.sum_requantize(coded, [coded], grid)
    with pytest.raises(ValueError, match="is on meta, but"):
        bq.quantize(Coded.zeros(grid, 4), x, grid)
