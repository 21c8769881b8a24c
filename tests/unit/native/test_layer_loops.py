"""Loops of a transformer layer on the host: bits, nearness to torch, threads, vector width and refusals."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.native import host_layer, status, thin_product
from mpispeed.native.host_layer import ACTIVATIONS, add_norm, attend, gated, rotate_
from mpispeed.native.norm import norm_reference
from mpispeed.native.thin_product import fits, thin_linear, thin_linear_reference

INCLUDE = Path(__file__).resolve().parents[3] / "cython" / "include"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1 / 128, torch.float16: 1 / 1024}
"""A unit in the last place, or what sums in another order differ by; relative to the largest element."""


def make(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


def assert_near(got, expected):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    scale = expected.double().abs().max() if expected.numel() else 1.0
    assert not expected.numel() or (got.double() - expected.double()).abs().max() <= NEAR[got.dtype] * max(scale, 1e-3)


@given(
    st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 9), st.integers(1, 40),
    st.sampled_from([1, 15, 16, 17, 100, 257]), st.booleans(), st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_products_have_the_bits_of_their_reference_on_any_threads(dtype, rows, outputs, inputs, has_bias, threads):
    x, weight = make(rows, inputs, dtype=dtype), make(outputs, inputs, dtype=dtype, seed=1)
    bias = make(outputs, dtype=dtype, seed=2) if has_bias else None
    expected = thin_linear_reference(x, weight, bias)
    assert torch.equal(thin_linear(x, weight, bias, threads=threads), expected)
    assert_near(
        expected,
        torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(dtype),
    )


def test_a_row_has_the_same_bits_in_any_batch():
    x, weight = make(7, 130), make(1100, 130, seed=1)
    whole = thin_linear(x, weight, threads=2)
    assert all(torch.equal(thin_linear(x[row], weight, threads=3), whole[row]) for row in range(7))


def test_products_are_left_to_torch_where_the_loop_does_not_fit():
    x, weight = make(2, 8), make(4, 8)
    assert fits(x, weight)
    assert not fits(make(65, 8), weight)
    assert not fits(x.double(), weight.double())
    assert not fits(x, weight.t().contiguous().t())
    assert not fits(x.requires_grad_(), weight)
    with torch.no_grad():
        assert fits(x, weight)
        with torch.autocast("cpu"):
            assert not fits(x, weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cols", [1, 16, 37, 1280])
@pytest.mark.parametrize("is_centered", [True, False])
def test_norms_are_those_of_the_reference(dtype, cols, is_centered):
    x, residual = make(3, 2, cols, dtype=dtype), make(3, 2, cols, dtype=dtype, seed=1)
    weight, bias = make(cols, dtype=dtype, seed=2), make(cols, dtype=dtype, seed=3) if is_centered else None
    total, y = add_norm(x, residual, weight, bias, 1e-5, is_centered=is_centered)
    expected_y, expected_total = norm_reference(x, residual, weight, bias, 1e-5, is_centered)[:2]
    assert torch.equal(total, expected_total)
    assert_near(y, expected_y)
    same, y = add_norm(x, None, None, None, 1e-5, is_centered=is_centered)
    assert same is x
    assert_near(y, norm_reference(x, None, None, None, 1e-5, is_centered)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(dtype, activation):
    x = torch.cat([make(400, dtype=dtype) * 5, torch.tensor([0.0, 30.0, -30.0, 200.0, -200.0], dtype=dtype)])
    other = make(405, dtype=dtype, seed=1)
    for second in (None, other):
        expected = host_layer.gated_reference(x, activation, second)
        got = gated(x, activation, second)
        assert_near(got, expected)
        place = x.clone()
        assert gated(place, activation, second, out=place) is place
        assert torch.equal(place, got)
    assert gated(torch.tensor([torch.nan], dtype=dtype), activation).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_halved", [True, False])
@pytest.mark.parametrize("repeat", [1, 2])
def test_heads_are_turned_as_in_the_reference(dtype, is_halved, repeat):
    size, half = 20, 7
    angles = make(5, half)
    tables = [table.repeat(1, 2 if is_halved else 1).to(dtype) for table in (angles.cos(), angles.sin())]
    whole = make(5 * repeat, 3 * size * 3, dtype=dtype)
    x = whole[:, 3 * size : 6 * size]
    expected = host_layer.rotate_reference(x, *tables, size, is_halved=is_halved)
    rest = whole[:, 6 * size :].clone()
    assert rotate_(x, *tables, size, is_halved=is_halved) is x
    assert_near(x, expected)
    assert torch.equal(whole[:, 6 * size :], rest)
    assert torch.equal(x.unflatten(1, (3, size))[..., 2 * half :], expected.unflatten(1, (3, size))[..., 2 * half :])


@given(
    st.sampled_from(FLOATS), st.integers(1, 3), st.sampled_from([(1, 1), (6, 2), (4, 4)]), st.integers(1, 40),
    st.sampled_from([4, 16, 24]), st.sampled_from(["none", "bool", "float"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_attention_is_that_of_the_reference(dtype, batch, heads, keys, size, kind, has_slopes):
    q = make(batch, heads[0], size, dtype=dtype)
    memory = make(2, batch, heads[1], keys + 3, size, dtype=dtype, seed=1)
    k, v = memory[0][:, :, :keys], memory[1][:, :, 2 : keys + 2]
    kept = make(batch, 1, 1, keys + 1, seed=2) > -0.5
    mask = {"none": None, "bool": kept, "float": torch.where(kept, 0.0, -1e4).to(dtype)}[kind]
    slopes = make(heads[0], seed=3).abs() if has_slopes else None
    got = attend(q, k, v, mask, 0.3, slopes=slopes)
    assert_near(got, host_layer.attend_reference(q, k, v, mask, 0.3, slopes=slopes))
    if has_slopes:
        return
    wide = [t.double().repeat_interleave(heads[0] // heads[1], 1) for t in (k, v)]
    row = None if mask is None else (mask if kind == "bool" else mask.double())[..., :keys]
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        q.double().unsqueeze(2), *wide, attn_mask=row, scale=0.3
    )
    assert_near(got, by_torch.squeeze(2).to(dtype))


def run_all(dtype, threads):
    """What all loops write."""
    torch.set_num_threads(threads)
    x, weight = make(5, 1296, dtype=dtype), make(1296, dtype=dtype, seed=1)
    outs = list(add_norm(x, x, weight, weight, 1e-5, is_centered=True))
    outs += [add_norm(x, None, weight, None, 1e-5, is_centered=False)[1]]
    outs += [gated(make(40000, dtype=dtype) * 4, name) for name in ACTIVATIONS]
    table = make(5, 24, dtype=dtype, seed=2)
    outs += [rotate_(x.clone(), table, table, 24, is_halved=is_halved) for is_halved in (True,)]
    k = make(4, 3, 900, 24, dtype=dtype, seed=3)
    outs += [attend(make(4, 6, 24, dtype=dtype), k, k, None, 0.2)]
    if dtype in thin_product.KINDS:
        outs += [thin_linear(x, make(77, 1296, dtype=dtype, seed=4), make(77, dtype=dtype))]
    return outs


@pytest.fixture
def own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_do_not_change_bits(dtype):
    assert all(map(torch.equal, run_all(dtype, 1), run_all(dtype, 3)))


@pytest.mark.usefixtures("own_threads")
def test_vector_width_does_not_change_bits(tmp_path, monkeypatch):
    expected = [run_all(dtype, 1) for dtype in FLOATS]
    loops = PlainLoops(tmp_path)
    for module in (host_layer, thin_product):
        monkeypatch.setattr(module.status, "compiled", lambda _name: loops)
    for dtype, outs in zip(FLOATS, expected, strict=True):
        assert all(map(torch.equal, run_all(dtype, 1), outs))
    assert loops.calls > 20


class PlainLoops:
    """The loops compiled for any x86-64, without clones, behind the names of the compiled module."""

    def __init__(self, folder):
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler is not None, "tests build with a C compiler"
        source, library = folder / "loops.c", folder / "loops.so"
        source.write_text(
            '#include "thin_loops.h"\n#include "layer_loops.h"\n'
            "void thin(mps_thin_job *job) { mps_run_thin(job, 1); }\n"
            "void layer(int what, int kind, void *job, size_t n) { mps_run_layer(what, kind, job, n, 1, 1, 1); }\n"
            "void attend(mps_attend_job *job) { mps_run_attend(job, 1); }\n"
        )
        flags = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]
        command = [compiler, *flags, "-w", "-DMPISPEED_NO_CLONES", f"-I{INCLUDE}", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self.loops, self.calls = ctypes.CDLL(str(library)), 0

    def job(self, ints, pointers, sizes, *more):
        self.calls += 1
        kinds = [ctypes.c_int] * len(ints) + [ctypes.c_void_p] * len(pointers) + [ctypes.c_size_t] * len(sizes)
        kinds += [ctypes.c_float] * len(more)
        fields = [(f"f{i}", kind) for i, kind in enumerate(kinds)]
        made = type("Job", (ctypes.Structure,), {"_fields_": fields})
        return ctypes.byref(made(*ints, *pointers, *sizes, *more))

    def thin(self, out, x, weight, bias, rows, outputs, inputs, kind, _threads):
        self.loops.thin(self.job([kind, 0], [out, x, weight, bias], [rows, outputs, inputs]))

    def norm(self, y, total, x, residual, weight, bias, rows, cols, eps, is_centered, kind, _threads):
        job = self.job([kind, is_centered], [y, total, x, residual, weight, bias], [rows, cols], eps)
        self.loops.layer(0, kind, job, ctypes.c_size_t(rows))

    def gate(self, out, x, other, n, what, kind, _threads):
        self.loops.layer(1, kind, self.job([kind, what], [out, x, other], [n]), ctypes.c_size_t(n))

    def rotary(self, x, cosine, sine, rows, *rest):
        *sizes, is_halved, kind, _threads = rest
        job = self.job([kind, is_halved], [x, cosine, sine], [rows, *sizes])
        self.loops.layer(2, kind, job, ctypes.c_size_t(rows))

    def attend(self, out, q, k, v, mask, mask_kind, mask_batch, slopes, sizes, k_strides, v_strides, scale, kind, _):
        counts = [*sizes, *k_strides, *v_strides, mask_batch]
        self.loops.attend(self.job([kind, mask_kind], [out, q, k, v, mask, slopes], counts, scale))


@pytest.fixture(params=["compiled", "reference"])
def either(request, monkeypatch):
    """The same refusals with and without compiled loops."""
    if request.param == "reference":
        monkeypatch.setattr(status, "compiled", lambda _name: None)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: thin_linear(make(2, 3), make(4, 5)), ValueError, r"x \(2, 3\), weight \(4, 5\)"),
        (lambda: thin_linear(make(2, 3), make(4, 3), make(3)), ValueError, r"bias \(3,\)"),
        (lambda: thin_linear(make(2, 3).half(), make(4, 3).half()), TypeError, "x is torch.float16"),
        (lambda: thin_linear(make(2, 3), make(4, 3).bfloat16()), TypeError, "weight is torch.bfloat16"),
        (lambda: thin_linear(make(2, 3), make(3, 4).t()), ValueError, r"strides \(1, 4\)"),
        (lambda: thin_linear(make(2, 3), make(4, 3), threads=0), ValueError, "threads is 0"),
        (lambda: add_norm(make(2, 3), make(2, 4), None, None, 0.0, is_centered=True), ValueError, "residual is"),
        (lambda: add_norm(make(2, 3), None, None, make(3), 0.0, is_centered=True), ValueError, "without a weight"),
        (lambda: add_norm(make(2, 3).double(), None, None, None, 0.0, is_centered=True), ValueError, "float64"),
        (lambda: gated(make(3), "swish"), ValueError, "known are none, relu"),
        (lambda: gated(make(3), "silu", make(4)), ValueError, "other is"),
        (lambda: gated(make(3, 4), "silu", out=make(4, 3).t()), ValueError, "out has strides"),
        (lambda: rotate_(make(4, 6), make(3, 2), make(3, 2), 6, is_halved=True), ValueError, "a divisor of the rows"),
        (lambda: rotate_(make(4, 6), make(4, 8), make(4, 8), 6, is_halved=True), ValueError, "not wider than a head"),
        (lambda: attend(make(1, 3, 4), make(1, 2, 5, 4), make(1, 2, 5, 4), None, 1.0), ValueError, "divide the heads"),
        (lambda: attend(make(1, 2, 4), make(1, 2, 4, 5).mT, make(1, 2, 5, 4), None, 1.0), ValueError, "strides of k"),
        (
            lambda: attend(make(1, 2, 4), make(1, 2, 5, 4), make(1, 2, 5, 4), torch.ones(1, 1, 1, 4) > 0, 1.0),
            ValueError,
            "mask is torch.bool",
        ),
        (
            lambda: attend(make(1, 2, 4), make(1, 2, 5, 4), make(1, 2, 5, 4), None, 1.0, slopes=make(3)),
            ValueError,
            "slopes are",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.usefixtures("either")
def test_empty_tensors_give_empty_results():
    assert thin_linear(make(0, 3), make(4, 3)).shape == (0, 4)
    assert thin_linear(make(2, 3), make(0, 3)).shape == (2, 0)
    assert gated(make(0), "silu").shape == (0,)
    assert add_norm(make(0, 3), None, None, None, 0.0, is_centered=True)[1].shape == (0, 3)
    assert attend(make(0, 2, 4), make(0, 2, 5, 4), make(0, 2, 5, 4), None, 1.0).shape == (0, 2, 4)
    assert torch.equal(attend(make(1, 2, 4), make(1, 2, 0, 4), make(1, 2, 0, 4), None, 1.0), torch.zeros(1, 2, 4))
