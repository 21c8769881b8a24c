"""Rows that are picked, spread, summed and multiplied by index: bits, order, threads and refusals."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mpispeed.native import permute, status
from mpispeed.native.permute import (
    combine_rows,
    combine_rows_reference,
    dot_rows,
    dot_rows_reference,
    permute_rows,
    permute_rows_reference,
    spread_rows,
    spread_rows_reference,
    working_dtype,
)
from tests.zoo import has_same_bits

INCLUDE = Path(__file__).resolve().parents[3] / "cython" / "include"
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# around a lane, a tile of 512, and whole lines of 64 bytes; the last is written past the cache
SHAPES = [(1, 1, 1), (3, 1, 5), (7, 2, 16), (5, 3, 17), (4, 2, 511), (9, 8, 513), (6, 5, 1040), (300, 2, 4096)]


def make(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


def routes(tokens, choices, *, spare=2, drop=0.2, seed=0):
    """index [tokens, choices] of distinct rows, some dropped, and the number of rows, of which some are not named."""
    source = torch.Generator().manual_seed(seed)
    rows = tokens * choices + spare
    index = torch.randperm(rows, generator=source)[: tokens * choices].view(tokens, choices)
    return index.masked_fill(torch.rand(index.shape, generator=source) < drop, -1), rows


def run_all(dtype, tokens, choices, width, threads, *, is_reference=False):
    """What all passes write, for one set of numbers."""
    index, count = routes(tokens, choices)
    work = working_dtype(dtype)
    x, rows, weights = make(tokens, width, dtype=dtype), make(count, width, dtype=dtype, seed=1), make(tokens, choices)
    weights = weights.to(work)
    picked = torch.randint(0, tokens, (count,), generator=torch.Generator().manual_seed(2))
    outs = {
        "pick": torch.full((count, width), 7.0, dtype=dtype),
        "combine": torch.full((tokens, width), 7.0, dtype=dtype),
        "combine_plain": torch.full((tokens, width), 7.0, dtype=dtype),
        "spread": torch.full((count, width), 7.0, dtype=dtype),
        "spread_plain": torch.full((count, width), 7.0, dtype=dtype),
        "dot": torch.full((tokens, choices), 7.0, dtype=work),
    }
    more = {} if is_reference else {"threads": threads}
    ours = (permute_rows, combine_rows, spread_rows, dot_rows)
    twins = (permute_rows_reference, combine_rows_reference, spread_rows_reference, dot_rows_reference)
    pick, combine, spread, dot = twins if is_reference else ours
    pick(outs["pick"], x, picked, **more)
    combine(outs["combine"], rows, index, weights, **more)
    combine(outs["combine_plain"], rows, index, **more)
    spread(outs["spread"], x, index, weights, **more)
    spread(outs["spread_plain"], x, index, **more)
    dot(outs["dot"], x, rows, index, **more)
    return outs


def assert_same_bits(found, expected):
    for name, value in expected.items():
        assert has_same_bits(found[name], value), name


def test_the_compiled_module_is_the_one_under_test():
    assert status.compiled("permute") is not None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "choices", "width"), SHAPES)
def test_passes_have_the_bits_of_their_references(dtype, tokens, choices, width):
    expected = run_all(dtype, tokens, choices, width, 1, is_reference=True)
    for threads in (1, 3):
        assert_same_bits(run_all(dtype, tokens, choices, width, threads), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_goes_choice_after_choice_and_is_rounded_once(dtype):
    index, count = routes(50, 5, drop=0.5)
    rows, weights = make(count, 33, dtype=dtype), make(50, 5, seed=3).to(working_dtype(dtype))
    out = torch.empty(50, 33, dtype=dtype)
    combine_rows(out, rows, index, weights)
    for t in range(50):
        terms = [
            rows[row].to(weights.dtype) * weight for row, weight in zip(index[t], weights[t], strict=True) if row >= 0
        ]
        total = torch.zeros(33, dtype=weights.dtype) if not terms else terms[0]
        for term in terms[1:]:
            total = total + term
        assert has_same_bits(out[t], total.to(dtype)), t


def test_a_dropped_choice_is_left_out_whatever_its_weight():
    rows, index = make(2, 40), torch.tensor([[0, -1], [-1, 1], [-1, -1]])
    weights = torch.tensor([[1.0, math.nan], [math.inf, 1.0], [math.nan, math.nan]])
    out = torch.empty(3, 40)
    combine_rows(out, rows, index, weights)
    assert has_same_bits(out, torch.cat([rows, torch.zeros(1, 40)]))
    products = torch.full((3, 2), 7.0)
    dot_rows(products, out, rows, index)
    assert products[index < 0].tolist() == [0.0] * 4


def test_products_are_close_to_exact():
    x, rows = make(20, 777), make(20, 777, seed=1)
    out = torch.empty(20, 1)
    dot_rows(out, x, rows, torch.arange(20).view(20, 1))
    exact = (x.double() * rows.double()).sum(1, keepdim=True)
    # products of fp32 are exact in fp64, and the sums err by far less than the last rounding to fp32
    bound = 2.0**-24 * exact.abs() + 1e-12
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_rows_of_any_dtype_are_picked(dtype):
    x = make(6, 130).mul(10).to(dtype)
    index = torch.tensor([5, 0, 0, 3])
    out = torch.empty(4, 130, dtype=dtype)
    permute_rows(out, x, index)
    assert has_same_bits(out, x[index])


@pytest.mark.parametrize("dtype", FLOATS)
def test_there_and_back(dtype):
    """Without drops the sum of what was spread is k times the token: exact for powers of two."""
    index, count = routes(64, 4, spare=0, drop=0)
    x = make(64, 48, dtype=dtype)
    rows, back = torch.empty(count, 48, dtype=dtype), torch.empty(64, 48, dtype=dtype)
    spread_rows(rows, x, index)
    order = torch.empty(count, dtype=torch.int64)
    order[index.view(-1)] = torch.arange(64).repeat_interleave(4)
    picked = torch.empty_like(rows)
    permute_rows(picked, x, order)
    assert has_same_bits(rows, picked)
    combine_rows(back, rows, index)
    assert has_same_bits(back, 4 * x)


def test_empty_shapes():
    nothing = torch.empty(0, 2, dtype=torch.int64)
    out = torch.empty(0, 8)
    combine_rows(out, torch.empty(0, 8), nothing)
    spread_rows(filled := torch.full((3, 8), 7.0), torch.empty(0, 8), nothing)
    assert not filled.any()
    none = torch.full((2, 2), -1)
    combine_rows(tokens := torch.full((2, 8), 7.0), torch.empty(0, 8), none)
    assert not tokens.any()
    dot_rows(products := torch.full((2, 2), 7.0), tokens, torch.empty(0, 8), none)
    assert not products.any()
    permute_rows(torch.empty(0, 8), tokens, nothing[:, 0].contiguous())
    combine_rows(tokens, torch.ones(3, 8), torch.empty(2, 0, dtype=torch.int64))
    assert not tokens.any()
    combine_rows(torch.empty(2, 0), torch.empty(3, 0), none)


def test_nan_and_infinity_of_a_row_reach_its_token_only():
    rows = torch.ones(3, 20, dtype=torch.bfloat16)
    rows[0, 3], rows[1, 4] = math.nan, math.inf
    out = torch.empty(2, 20, dtype=torch.bfloat16)
    combine_rows(out, rows, torch.tensor([[0, 1], [2, 2]]), torch.full((2, 2), 0.5))
    assert out[0, 3].isnan()
    assert out[0, 4] == math.inf
    assert out[1].eq(1).all()


@pytest.fixture(params=["compiled", "reference"])
def either(request, monkeypatch):
    """The same refusals with and without compiled loops."""
    if request.param == "reference":
        monkeypatch.setattr(permute, "_host_loops", lambda _x: None)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(("place", "row"), [(0, 6), (3, -2), (5, 2**62), (2, -(2**63))])
def test_places_outside_are_refused_before_anything_is_written(place, row):
    index = torch.arange(6).view(3, 2).clone()
    index.view(-1)[place] = row
    x, rows = make(3, 8), make(6, 8)
    at = rf"index\[{place // 2}, {place % 2}\] is {row}, but {{}} has 6 rows; they are 0 to 5, and -1 for a dropped"
    out = torch.full((3, 8), 7.0)
    with pytest.raises(IndexError, match=at.format("rows")):
        combine_rows(out, rows, index)
    with pytest.raises(IndexError, match=at.format("rows")):
        dot_rows(torch.empty(3, 2), x, rows, index)
    wide = torch.full((6, 8), 7.0)
    with pytest.raises(IndexError, match=at.format("out")):
        spread_rows(wide, x, index)
    with pytest.raises(IndexError, match=rf"index\[{place}\] is {row}, but x has 6 rows; they are 0 to 5$"):
        permute_rows(wide, rows, index.view(-1))
    assert out.eq(7).all()
    assert wide.eq(7).all()


@pytest.mark.usefixtures("either")
def test_a_row_is_not_left_out_of_a_pick():
    with pytest.raises(IndexError, match=r"index\[1\] is -1, but x has 2 rows; they are 0 to 1$"):
        permute_rows(torch.empty(2, 4), torch.empty(2, 4), torch.tensor([0, -1]))


@pytest.mark.usefixtures("either")
def test_two_choices_for_one_row_are_refused():
    index = torch.tensor([[3, -1], [0, -1], [1, 3], [1, 2]])
    out = torch.full((4, 8), 7.0)
    with pytest.raises(ValueError, match=r"index\[2, 1\] is 3, as is an earlier choice; a row of out belongs to one"):
        spread_rows(out, make(4, 8), index)
    assert out.eq(7).all()


def test_conjugates_that_are_not_in_memory_are_refused():
    x, index = torch.complex(make(3, 2), make(3, 2)), torch.tensor([2, 0, 1])
    out = torch.empty_like(x)
    for lazy in (x.conj(), torch._neg_view(x)):
        with pytest.raises(ValueError, match="x is a conjugate or negative that is not in memory"):
            permute_rows(out, lazy, index)
        permute_rows(out, lazy.resolve_conj().resolve_neg(), index)
        assert torch.equal(out, lazy[index])


def test_wrong_arguments_are_refused():
    x, rows, index = make(3, 8), make(6, 8), torch.arange(6).view(3, 2)
    out = torch.empty(3, 8)
    with pytest.raises(TypeError, match=r"index has dtype torch\.int32; use int64"):
        combine_rows(out, rows, index.int())
    with pytest.raises(TypeError, match=r"rows is torch\.float64 and out is torch\.float32"):
        combine_rows(out, rows.double(), index)
    with pytest.raises(TypeError, match=r"weights is torch\.float64; with out in torch\.float32 use torch\.float32"):
        combine_rows(out, rows, index, make(3, 2).double())
    with pytest.raises(TypeError, match=r"out is torch\.int32; use fp32"):
        combine_rows(out.int(), rows.int(), index)
    with pytest.raises(TypeError, match=r"out is torch\.bfloat16; with x in torch\.bfloat16 use torch\.float32"):
        dot_rows(torch.empty(3, 2).bfloat16(), x.bfloat16(), rows.bfloat16(), index)
    with pytest.raises(ValueError, match=r"weights has shape \(2, 3\); index needs \(3, 2\)"):
        combine_rows(out, rows, index, make(2, 3))
    with pytest.raises(ValueError, match=r"index has shape \(6,\); expected \[T, k\]"):
        combine_rows(out, rows, index.view(-1))
    with pytest.raises(ValueError, match="out has 4 rows and index 3; both have to be T"):
        combine_rows(torch.empty(4, 8), rows, index)
    with pytest.raises(ValueError, match="x has 4 rows and index 3; both have to be T"):
        spread_rows(rows, make(4, 8), index)
    with pytest.raises(ValueError, match="out has 3 rows and index 6; both have to be M"):
        permute_rows(out, x, index.view(-1))
    with pytest.raises(ValueError, match=r"rows has shape \(6, 9\); all matrices need two dims and one row length"):
        combine_rows(out, make(6, 9), index)
    with pytest.raises(ValueError, match=r"rows has strides \(1, 6\)"):
        combine_rows(out, make(8, 6).t(), index)
    with pytest.raises(ValueError, match="index is on meta and out is on cpu"):
        combine_rows(out, rows, index.to("meta"))
    with pytest.raises(ValueError, match="out and rows overlap"):
        combine_rows(rows[:3], rows, index)
    with pytest.raises(ValueError, match="threads is 0"):
        combine_rows(out, rows, index, threads=0)


def build_for_level(folder, level):
    """The loops compiled as x86-64-v1, v3 or v4, without clones, behind the names of the compiled module."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "tests build with a C compiler"
    source, library = folder / "loops.c", folder / f"loops-{level}.so"
    source.write_text(
        '#include "row_loops.h"\n'
        "void run(mps_row_job *job) { mps_run_rows(job, 1); }\n"
        "size_t size(void) { return sizeof(mps_row_job); }\n"
    )
    march = [f"-march=x86-64-v{level}"] if level > 1 else []
    flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]
    command = [compiler, *flags, *march, "-w", "-DMPISPEED_NO_CLONES", f"-I{INCLUDE}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    loops = ctypes.CDLL(str(library))
    loops.size.restype = ctypes.c_size_t
    assert loops.size() == ctypes.sizeof(Job)
    return loops


class Job(ctypes.Structure):
    """mps_row_job."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("what", "kind")),
        *((name, ctypes.c_void_p) for name in ("out", "x", "y", "index", "weights", "named")),
        *((name, ctypes.c_size_t) for name in ("tokens", "choices", "rows", "width", "element")),
    )


class Loops:
    """The compiled module with the loops of one level."""

    def __init__(self, loops):
        self.loops = loops
        self.wrong_place = status.require("permute").wrong_place

    def run(self, sizes, **fields):
        names = ("tokens", "choices", "rows", "width", "element")
        self.loops.run(ctypes.byref(Job(**fields, **dict(zip(names, sizes, strict=True)))))

    def pick(self, out, x, index, sizes, _threads):
        self.run(sizes, what=0, out=out, x=x, index=index)

    def combine(self, out, x, index, weights, sizes, kind, _threads):
        self.run(sizes, what=1, kind=kind, out=out, x=x, index=index, weights=weights)

    def spread(self, out, x, index, weights, named, sizes, kind, _threads):
        self.run(sizes, what=2, kind=kind, out=out, x=x, index=index, weights=weights, named=named)

    def dot(self, out, x, y, index, sizes, kind, _threads):
        self.run(sizes, what=3, kind=kind, out=out, x=x, y=y, index=index)


def test_vector_width_does_not_change_bits(tmp_path, monkeypatch):
    expected = [run_all(dtype, 9, 3, 1041, 1) for dtype in FLOATS]
    for level in (level for level in (1, 3, 4) if level <= status.require("cpu_optim").vector_level()):
        module = Loops(build_for_level(tmp_path, level))
        monkeypatch.setattr(permute, "_host_loops", lambda _x, module=module: module)
        for dtype, value in zip(FLOATS, expected, strict=True):
            assert_same_bits(run_all(dtype, 9, 3, 1041, 1), value)
