"""Tree sums and exact sums of squares: order, rounding, and independence of threads and cuts."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from mpispeed.native import status
from mpispeed.native.reduce import (
    square_partials,
    square_partials_reference,
    tree_reduce,
    tree_sum,
    tree_sum_reference,
)
from tests.zoo import has_same_bits

SIZES = [0, 1, 7, 15, 16, 17, 55, 1023, 1024, 1025]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
LOOPS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
]
INCLUDE = Path(__file__).resolve().parents[3] / "cython" / "include"


def make_parts(number, count, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=source, dtype=torch.float64).to(dtype) for _ in range(number)]


def explicit_tree(values):
    """The tree of the contract, one level at a time, on a list of tensors."""
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def test_the_compiled_module_is_the_one_under_test():
    assert status.compiled("fp_sum") is not None


@pytest.mark.parametrize("number", [*range(1, 10), 11, 16, 31, 37, 64, 100])
@pytest.mark.parametrize(("dtype", "out_dtype"), LOOPS)
def test_sum_is_the_explicit_tree(number, dtype, out_dtype):
    parts = make_parts(number, 1031, dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty(1031, dtype=out_dtype)
    tree_sum(out, parts)
    assert has_same_bits(out, explicit_tree([x.to(work) for x in parts]).to(out_dtype))
    tree_sum(out, parts, scale=1 / 3)
    assert has_same_bits(out, (explicit_tree([x.to(work) for x in parts]) * (1 / 3)).to(out_dtype))
    reference = torch.empty_like(out)
    tree_sum_reference(reference, parts, scale=1 / 3)
    assert has_same_bits(out, reference)


def test_many_parts():
    values = torch.randn(4096, 3, generator=torch.Generator().manual_seed(1))
    out = torch.empty(3)
    tree_sum(out, list(values.unbind()))
    assert has_same_bits(out, explicit_tree(list(values.unbind())))


@pytest.mark.parametrize("count", [*SIZES, 2**20 + 3])
@pytest.mark.parametrize("number", [2, 5])
def test_sizes_and_threads(count, number):
    parts = make_parts(number, count, torch.bfloat16)
    one, three = (torch.full((count,), 7.0, dtype=torch.bfloat16) for _ in range(2))
    tree_sum(one, parts, threads=1)
    tree_sum(three, parts, threads=3)
    assert has_same_bits(one, three)
    assert has_same_bits(one, explicit_tree([x.float() for x in parts]).bfloat16())


@pytest.mark.parametrize("cut", [1, 15, 17, 1023, 1025, 2000])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cuts_and_unaligned_views_do_not_change_bits(cut, number, dtype):
    parts = make_parts(number, 2051, dtype)
    whole, pieces = (torch.empty(2051, dtype=dtype) for _ in range(2))
    tree_sum(whole, parts, scale=0.3)
    for part in (slice(0, cut), slice(cut, 2051)):
        tree_sum(pieces[part], [x[part] for x in parts], scale=0.3)
    assert has_same_bits(whole, pieces)


@pytest.mark.parametrize("number", range(1, 10))
def test_out_may_be_any_of_the_parts(number):
    for place in range(number):
        parts = make_parts(number, 3000)
        expected = explicit_tree(list(parts))
        tree_sum(parts[place], parts, threads=2)
        assert has_same_bits(parts[place], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_sums_are_rounded_once(dtype):
    parts = [torch.full((40,), v, dtype=dtype) for v in (256.0, 0.5, 0.5, 0.5, 0.5)]
    out = torch.empty(40, dtype=dtype)
    tree_sum(out, parts)
    assert torch.equal(out, torch.full((40,), 258.0, dtype=dtype))
    half_scaled = torch.empty(40, dtype=dtype)
    tree_sum(half_scaled, [torch.full((40,), 40000.0, dtype=dtype)] * 2, scale=0.5)
    assert torch.equal(half_scaled, torch.full((40,), 40000.0, dtype=dtype))  # 80000 is beyond fp16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [2, 4, 6])
def test_nan_and_infinity_propagate(dtype, number):
    parts = make_parts(number, 100, dtype)
    parts[0][5], parts[1][6], parts[0][7], parts[1][7] = math.nan, math.inf, math.inf, -math.inf
    out = torch.empty(100, dtype=dtype)
    tree_sum(out, parts)
    assert out[5].isnan()
    assert out[6] == math.inf
    assert out[7].isnan()
    out[5:8] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_summed_in_their_dtype(dtype):
    parts = [torch.full((9,), v, dtype=dtype) for v in (100, 100, 27)]
    out = torch.empty(9, dtype=dtype)
    tree_sum(out, parts)
    assert torch.equal(out, parts[0] + parts[1] + parts[2])
    with pytest.raises(TypeError, match="integers can only be summed"):
        tree_sum(out, parts, scale=0.5)


def test_booleans_and_complex_numbers():
    out = torch.empty(2, dtype=torch.bool)
    tree_sum(out, [torch.tensor([True, False]), torch.tensor([True, False])])
    assert out.tolist() == [True, False]
    total = torch.empty(1, dtype=torch.complex64)
    tree_sum(total, [torch.tensor([1 + 2j]), torch.tensor([3 - 1j])], scale=0.5)
    assert total.item() == 2 + 0.5j


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_other_reductions(dtype, number):
    parts = [(x * 10).to(dtype) for x in make_parts(number, 33, torch.float64)]
    out = torch.empty(33, dtype=dtype)
    stacked = torch.stack(parts)
    tree_reduce(out, parts, "max")
    assert torch.equal(out, stacked.amax(0))
    tree_reduce(out, parts, "min")
    assert torch.equal(out, stacked.amin(0))
    tree_reduce(out, parts, "prod")
    wide = stacked.double().prod(0)
    if not dtype.is_floating_point:
        assert torch.equal(out.double(), wide)
    else:  # rounded once per product in the working dtype, once more at the end
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}[dtype]
        torch.testing.assert_close(out.double(), wide, rtol=tolerance, atol=0)
    tree_reduce(out, parts, "sum")
    expected = torch.empty_like(out)
    tree_sum(expected, parts)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
def test_bits_are_combined(dtype):
    parts = [torch.tensor(values, dtype=torch.int64).to(dtype) for values in ([12, 3, -1], [10, 3, 5], [6, 0, 7])]
    out = torch.empty(3, dtype=dtype)
    for op, wanted in (("band", [0, 0, 5]), ("bor", [14, 3, -1]), ("bxor", [12 ^ 10 ^ 6, 0, -1 ^ 5 ^ 7])):
        tree_reduce(out, parts, op)
        assert torch.equal(out, torch.tensor(wanted).to(dtype)), op


def test_wrong_arguments_are_refused():
    parts = make_parts(2, 10)
    out = torch.empty(10)
    with pytest.raises(ValueError, match="0 parts"):
        tree_sum(out, [])
    with pytest.raises(ValueError, match=r"parts\[1\] has 9 elements but out has 10"):
        tree_sum(out, [parts[0], parts[1][:9]])
    with pytest.raises(TypeError, match=r"parts\[1\] has dtype torch\.float64"):
        tree_sum(out, [parts[0], parts[1].double()])
    with pytest.raises(TypeError, match=r"out has dtype torch\.float64"):
        tree_sum(out.double(), parts)
    with pytest.raises(ValueError, match="overlap"):
        long = torch.zeros(12)
        tree_sum(long[1:11], [parts[0], long[0:10]])
    with pytest.raises(ValueError, match="strides"):
        tree_sum(out, [parts[0], torch.zeros(20)[::2]])
    with pytest.raises(ValueError, match="threads is 0"):
        tree_sum(out, parts, threads=0)
    with pytest.raises(ValueError, match="unknown op 'mean'"):
        tree_reduce(out, parts, "mean")
    with pytest.raises(TypeError, match="only integers have bits"):
        tree_reduce(out, parts, "bxor")
    with pytest.raises(TypeError, match="no order"):
        tree_reduce(torch.zeros(1, dtype=torch.complex64), [torch.zeros(1, dtype=torch.complex64)], "max")
    with pytest.raises(TypeError, match=r"x has dtype torch\.int64"):
        square_partials(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="block is 0"):
        square_partials(out, block=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("block", [1, 16, 100, 256])
def test_squares_equal_the_twin_and_are_close_to_exact(dtype, count, block):
    x = make_parts(1, count, dtype)[0]
    total = math.fsum(square_partials(x, block=block))
    assert total == math.fsum(square_partials_reference(x, block=block))
    exact = float(sum((Fraction(v) ** 2 for v in x.tolist()), Fraction(0)))
    # within a block: one rounding of the square and at most block/16 + 4 of sums of positive numbers, each 2^-53
    assert total == pytest.approx(exact, rel=(block / 16 + 6) * 2**-53, abs=0)


def test_block_sums_are_added_without_any_error():
    # squares 2^200, 2^-200 and 2^-149: no double holds their sum, and plain addition would lose the small ones
    x = torch.tensor([2.0**100, 2.0**-100, 2.0**-70, 2.0**100])
    partials = square_partials(x, block=1)
    exact = Fraction(2) ** 201 + Fraction(2) ** -200 + Fraction(2) ** -140
    assert sum(map(Fraction, partials)) == exact
    assert sum(map(Fraction, square_partials_reference(x, block=1))) == exact


def test_the_list_is_short_for_every_mix_of_magnitudes():
    exponents = torch.linspace(-149, 127, 20000, dtype=torch.float64)
    x = (2.0**exponents).float()
    partials = square_partials(x, block=1, threads=2)
    assert len(partials) <= 41
    assert sum(map(Fraction, partials)) == sum(Fraction(v) ** 2 for v in x.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_do_not_depend_on_threads(dtype):
    x = make_parts(1, 2**18 + 3, dtype)[0]
    totals = {math.fsum(square_partials(x, threads=threads)) for threads in (1, 2, 3, 5)}
    assert len(totals) == 1


@pytest.mark.parametrize("cut", [256, 512, 1024, 4096, 19968])
def test_squares_do_not_depend_on_the_cut(cut):
    x = make_parts(1, 20001)[0]
    pieces = square_partials(x[:cut]) + square_partials(x[cut:])
    assert math.fsum(pieces) == math.fsum(square_partials(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_squares_of_nan_and_infinity(dtype):
    x = torch.ones(2**17, dtype=dtype)
    x[70000] = -math.inf
    for compute in (square_partials, square_partials_reference):
        assert compute(x, threads=2) == [math.inf]
    x[3] = math.nan
    for compute in (square_partials, square_partials_reference):
        result = compute(x, threads=2)
        assert len(result) == 1
        assert math.isnan(result[0])


def test_fp64_overflow_counts_as_infinite():
    assert square_partials(torch.tensor([1e200, 1.0], dtype=torch.float64)) == [math.inf]


def test_largest_fp32_values_do_not_overflow():
    x = torch.full((1000,), torch.finfo(torch.float32).max)
    exact = 1000 * Fraction(torch.finfo(torch.float32).max) ** 2
    assert math.fsum(square_partials(x)) == pytest.approx(float(exact), rel=1e-14)


def test_missing_module_runs_the_twins(monkeypatch):
    parts = make_parts(5, 100, torch.bfloat16)
    out, reference = (torch.empty(100, dtype=torch.bfloat16) for _ in range(2))
    tree_sum(out, parts, scale=0.2)
    total = math.fsum(square_partials(out))
    monkeypatch.setattr(status, "compiled", lambda name: None)
    tree_sum(reference, parts, scale=0.2)
    assert has_same_bits(out, reference)
    assert math.fsum(square_partials(out)) == total


def build_for_level(folder, level):
    """Block sums of squares compiled for one x86-64 level alone."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed, as for building the package"
    source, library = folder / "squares.c", folder / f"squares{level}.so"
    source.write_text(
        '#include "square_loops.h"\n'
        "double run(const float *x, size_t n) { mps_exact t; double v[MPS_PARTIALS]; memset(&t, 0, sizeof t);"
        " mps_square_f32(x, n, n, &t); return mps_exact_partials(&t, v) == 1 ? v[0] : -1.0; }\n"
    )
    march = [f"-march=x86-64-v{level}"] if level > 1 else []
    flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd", "-shared", "-fPIC"]
    command = [compiler, *flags, *march, "-w", "-DMPISPEED_NO_CLONES", f"-I{INCLUDE}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def test_vector_width_does_not_change_block_sums(tmp_path):
    levels = [level for level in (1, 3, 4) if level <= status.require("cpu_optim").vector_level()]
    x = make_parts(1, 1003)[0]
    expected = square_partials(x, block=1003)
    for level in levels:
        library = build_for_level(tmp_path, level)
        library.run.restype = ctypes.c_double
        assert [library.run(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(1003))] == expected
