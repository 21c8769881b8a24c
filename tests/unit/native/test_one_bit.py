"""Signs and scales: bits of the compiled loops beside the references, the definition in numpy, corners, refusals."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.native import one_bit as ob
from mpispeed.native import status
from tests.helpers.codes import same, same_sum
from tests.helpers.system import cannot

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 7, 8, 255, 256, 257, 1021, 70_001]
WHOLE = [0, 8, 248, 256, 264, 1000, 70_008]  # bytes are whole
THREADS = [1, 2, 3]
INCLUDE = Path(__file__).resolve().parents[3] / "cython" / "include"


def make_values(count, dtype=torch.float32, seed=0):
    """Normal numbers with zeros of both signs among them."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    x[::7], x[3::11] = 0.0, -0.0
    return x.to(dtype)


def make_wild(count, dtype=torch.float32, seed=1):
    """Any bit patterns: subnormals, huge values, infinities and NaNs."""
    source = torch.Generator().manual_seed(seed)
    width = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(width)
    x = torch.randint(info.min, info.max, (count,), generator=source, dtype=torch.int64).to(width).view(dtype)
    kept = x.isfinite() | (torch.rand(count, generator=source) < 0.01)
    x = torch.where(kept, x, 1.0).to(dtype)
    small = torch.rand(count, generator=source) < 0.1
    return torch.where(small, torch.finfo(dtype).smallest_normal / 8, x).to(dtype)


def make_finite(count, dtype=torch.float32, seed=1):
    """Any bit patterns of numbers whose sums do not overflow."""
    x = make_wild(count, dtype, seed)
    return torch.where(x.abs() < torch.finfo(dtype).max / 8, x, -0.0).to(dtype)


def make_bytes(count, seed=2):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (-(-count // 8),), generator=source, dtype=torch.uint8)


def test_the_compiled_module_is_the_one_under_test():
    assert status.compiled("one_bit") is not None


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [make_values, make_finite, make_wild])
def test_compensate_is_its_twin(make, dtype, threads):
    for count in LENGTHS:
        for keep in (1.0, 0.9):
            x, ours = make(count, dtype), make(count, seed=5)
            reference = ours.clone()
            squares = ob.compensate(ours, x, keep=keep, threads=threads)
            assert same_sum(squares, ob.compensate_reference(reference, x, keep=keep))
            assert same(ours, reference)
        for grad_dtype in FLOATS:
            grad = make(count, grad_dtype, seed=6)
            squares = ob.compensate(ours, x, keep=0.9, grad=grad, take=0.1, threads=threads)
            assert same_sum(squares, ob.compensate_reference(reference, x, keep=0.9, grad=grad, take=0.1))
            assert same(ours, reference)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("make", [make_values, make_finite, make_wild])
def test_add_parts_is_its_twin(make, threads):
    weights = [0.25, 1e-40, 3.0, math.inf, 1.7, 2.0**120, 0.0]
    for count in WHOLE:
        for number in (1, 2, 3, 7):
            parts = [make_bytes(count, seed) for seed in range(number)]
            ours = make(count, seed=4)
            reference = ours.clone()
            squares = ob.add_parts(ours, parts, weights[:number], threads=threads)
            assert same_sum(squares, ob.add_parts_reference(reference, parts, weights[:number]))
            assert same(ours, reference)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("scale", [0.0, 1e-41, 0.7, 2.0**127, math.inf, math.nan])
@pytest.mark.parametrize("make", [make_values, make_wild])
def test_encode_is_its_twin_and_packbits(make, scale, threads):
    for count in WHOLE:
        ours = make(count)
        reference, wanted = ours.clone(), np.packbits(ours.numpy() >= 0)
        bits, twin_bits = torch.full((2, count // 8), 85, dtype=torch.uint8)
        ob.encode(bits, ours, scale, threads=threads)
        ob.encode_reference(twin_bits, reference, scale)
        assert np.array_equal(bits.numpy(), wanted)
        assert torch.equal(bits, twin_bits)
        assert same(ours, reference)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("scale", [0.0, 1e-41, 0.7, 2.0**127, math.inf, math.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_decode_is_its_twin_and_unpackbits(dtype, scale, threads):
    for count in LENGTHS:
        bits = make_bytes(count)
        ours, reference = torch.full((2, count), 3.0, dtype=dtype)
        ob.decode(ours, bits, scale, threads=threads)
        ob.decode_reference(reference, bits, scale)
        assert same(ours, reference)
        flags = torch.from_numpy(np.unpackbits(bits.numpy(), count=count))
        assert same(ours, torch.where(flags.bool(), scale, -scale).to(dtype))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_ranges_are_decoded_alike(dtype, offset, threads):
    """Those that are written past the cache, if they are aligned."""
    count = 2**19 + 1029
    bits, room = make_bytes(count), torch.full((count + 8,), 3.0, dtype=dtype)
    ours, reference = room[offset : offset + count], torch.empty(count, dtype=dtype)
    ob.decode(ours, bits, 0.7, threads=threads)
    ob.decode_reference(reference, bits, 0.7)
    assert same(ours, reference)
    assert (room[:offset] == 3.0).all()
    assert (room[offset + count :] == 3.0).all()


@pytest.mark.parametrize("offset", [1, 3, 4])
def test_nothing_is_written_beside_unaligned_ranges(offset):
    count = 4104
    bits, error = torch.full((count // 8 + 16,), 85, dtype=torch.uint8), make_values(count + 16)
    before, own = error.clone(), bits[offset : offset + count // 8]
    ob.encode(own, error[offset : offset + count], 0.5, threads=2)
    out = torch.full((count + 16,), 3.0, dtype=torch.bfloat16)
    ob.decode(out[offset : offset + count], own, 0.5)
    ob.compensate(error[offset : offset + count], out[offset : offset + count])
    assert np.array_equal(own.numpy(), np.packbits(before[offset : offset + count].numpy() >= 0))
    for x, y in ((bits, torch.full_like(bits, 85)), (error, before), (out, torch.full_like(out, 3.0))):
        width = len(own) if x is bits else count
        assert torch.equal(x[:offset], y[:offset])
        assert torch.equal(x[offset + width :], y[offset + width :])
    # two roundings of numbers below 8
    torch.testing.assert_close(error, before, rtol=0, atol=2.0**-21)


def test_signs_of_corners():
    denormal = 1e-45
    error = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, denormal, -denormal])
    bits, out = torch.zeros(1, dtype=torch.uint8), torch.empty(8)
    ob.encode(bits, error, 2.0)
    assert bits.item() == 0b11001010
    assert error[:2].tolist() == [-2.0, -2.0]
    assert error[2:4].isnan().all()
    assert error[4:].tolist() == [math.inf, -math.inf, -2.0, 2.0]
    ob.decode(out, bits, 2.0)
    assert out.tolist() == [2.0, 2.0, -2.0, -2.0, 2.0, -2.0, 2.0, -2.0]


def test_threads_take_the_float_mode_of_the_caller():
    count = 70_008
    x, first = torch.full((count,), 1e-41), torch.zeros(count)
    try:
        if not torch.set_flush_denormal(True):
            cannot("this processor does not flush denormals")
        ob.compensate(first, x, threads=1)
        for threads in (2, 3):
            other = torch.zeros(count)
            ob.compensate(other, x, threads=threads)
            assert same(first, other)
    finally:
        torch.set_flush_denormal(False)


@given(st.integers(0, 3000), st.integers(0, 2**31), st.sampled_from(FLOATS), st.floats(-2, 2), st.integers(1, 3))
def test_compensate_for_any_length(count, seed, dtype, keep, threads):
    x, ours = make_finite(count, dtype, seed), make_values(count, seed=seed + 1)
    reference, wide = ours.clone(), x.double() * torch.tensor(keep, dtype=torch.float32).double() + ours.double()
    squares = ob.compensate(ours, x, keep=keep, threads=threads)
    assert same_sum(squares, ob.compensate_reference(reference, x, keep=keep))
    assert same(ours, reference)
    slack = 2.0**-23 * (2 * x.double().abs() + wide.abs()) + 2.0**-148  # each operation rounds once
    assert ((ours.double() - wide).abs() <= slack).all()


@given(st.integers(0, 400), st.integers(0, 2**31), st.sampled_from(FLOATS), st.floats(0, 2.0**100, width=32))
def test_a_coded_value_and_what_is_left_make_the_value(length, seed, dtype, scale):
    count = 8 * length
    error, bits, out = make_values(count, seed=seed), torch.empty(length, dtype=torch.uint8), torch.empty(count)
    before = error.clone()
    ob.encode(bits, error, scale)
    ob.decode(out, bits, scale)
    assert torch.equal(out, torch.where(before >= 0, scale, -scale).float())
    assert same(before - out, error)
    narrow = torch.empty(count, dtype=dtype)
    ob.decode(narrow, bits, scale)
    assert same(narrow, out.to(dtype))


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 2**31), st.integers(1, 3))
def test_add_parts_for_any_length(length, number, seed, threads):
    count, source = 8 * length, np.random.default_rng(seed)
    weights = source.random(number).tolist()
    parts = [make_bytes(count, seed + k) for k in range(number)]
    ours = make_values(count, seed=seed)
    reference, wanted = ours.clone(), ours.double().numpy()
    for part, weight in zip(parts, weights, strict=True):
        wanted = wanted + weight * (2.0 * np.unpackbits(part.numpy()) - 1.0)
    squares = ob.add_parts(ours, parts, weights, threads=threads)
    assert same_sum(squares, ob.add_parts_reference(reference, parts, weights))
    assert same(ours, reference)
    assert np.abs(ours.numpy() - wanted).max() <= (number + 1) * 2.0**-24 * (sum(weights) + 5.0)


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(0, ob.TILE - 1), st.integers(0, 2**31))
def test_a_range_in_pieces_has_the_same_scale(tiles, rest, seed):
    cuts = [ob.TILE * n for n in tiles] + [rest]
    x = make_finite(sum(cuts), seed=seed)
    whole, pieces, squares = torch.zeros_like(x), torch.zeros_like(x), []
    scale = ob.scale_of(ob.compensate(whole, x, threads=2), x.numel())
    for piece, part in zip(pieces.split(cuts), x.split(cuts), strict=True):
        squares += ob.compensate(piece, part)
    assert torch.equal(whole, pieces)
    assert ob.scale_of(squares, x.numel()) == scale


@given(st.integers(1, 3000), st.integers(0, 2**31))
def test_a_scale_is_the_root_of_the_mean_square(count, seed):
    x, error = make_values(count, seed=seed), torch.zeros(count)
    wanted = np.sqrt(np.mean(np.square(x.double().numpy())))
    found = ob.scale_of(ob.compensate(error, x), count)
    assert found == np.float32(found)
    assert abs(found - wanted) <= np.spacing(np.float32(wanted)) / 2 * (1 + 1e-6)  # fp64 rounds before fp32 does


def test_scales_of_corners():
    assert ob.scale_of([], 0) == 0.0
    assert ob.scale_of([], 8) == 0.0
    top = torch.finfo(torch.float32).max
    for value, wanted in ((top, top), (math.inf, math.inf), (math.nan, math.nan), (1e-45, 1e-45)):
        error = torch.zeros(70_001)
        scales = [ob.scale_of(ob.compensate(error.clone(), torch.full_like(error, value), threads=t), error.numel())
                  for t in THREADS]  # fmt: skip
        assert all(torch.tensor(s).equal(torch.tensor(wanted)) or math.isnan(s) == math.isnan(wanted) for s in scales)
        assert len({repr(s) for s in scales}) == 1


@given(st.floats())
def test_rounding_to_fp32_is_that_of_numpy(value):
    with np.errstate(over="ignore"):
        wanted = float(np.float32(value))
    found = ob.to_fp32(value)
    assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_twins_run_where_nothing_is_compiled(monkeypatch):
    x, grad, part = make_values(264), make_values(264, torch.bfloat16, 3), make_bytes(264)
    results = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(status, "compiled", lambda name: None)
        error, bits, out = make_values(264, seed=9), torch.empty(33, dtype=torch.uint8), torch.empty(261)
        sums = [ob.compensate(error, x, keep=0.9, grad=grad, take=0.1), ob.add_parts(error, [part] * 2, [0.5, 0.25])]
        ob.encode(bits, error, 0.7)
        ob.decode(out, bits, 0.7)
        results.append((error, bits, out, [math.fsum(s) for s in sums]))
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference) if isinstance(ours, torch.Tensor) else ours == reference


def test_wrong_arguments_are_refused():
    error, bits = torch.zeros(64), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="compensate: x has 63 elements but error has 64"):
        ob.compensate(error, error[:63])
    with pytest.raises(ValueError, match="compensate: grad has 8 elements but error has 64"):
        ob.compensate(error, error.clone(), grad=error[:8], take=0.1)
    with pytest.raises(TypeError, match=r"compensate: error has dtype torch\.bfloat16; use torch\.float32"):
        ob.compensate(error.bfloat16(), error)
    with pytest.raises(TypeError, match=r"compensate: x has dtype torch\.float64; use .* or torch\.float16"):
        ob.compensate(error, error.double())
    with pytest.raises(ValueError, match="add_parts: 0 parts and 0 weights; pass at least one"):
        ob.add_parts(error, [], [])
    with pytest.raises(ValueError, match="add_parts: 1 parts and 2 weights"):
        ob.add_parts(error, [bits], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"add_parts: parts\[1\] has 7 bytes for 64 elements; eight"):
        ob.add_parts(error, [bits, bits[:7]], [1.0, 1.0])
    with pytest.raises(ValueError, match="encode: bits has 8 bytes for 63 elements"):
        ob.encode(bits, error[:63], 1.0)
    with pytest.raises(TypeError, match=r"encode: bits has dtype torch\.int8; bits are packed in uint8"):
        ob.encode(bits.char(), error, 1.0)
    with pytest.raises(ValueError, match="decode: bits has 8 bytes for 56 elements"):
        ob.decode(error[:56], bits, 1.0)
    with pytest.raises(TypeError, match=r"decode: out has dtype torch\.int32"):
        ob.decode(error.int(), bits, 1.0)
    with pytest.raises(ValueError, match="decode: out has strides"):
        ob.decode(torch.zeros(128)[::2], bits, 1.0)
    with pytest.raises(ValueError, match="encode: error is on meta"):
        ob.encode(bits, error.to("meta"), 1.0)
    for call in (
        lambda: ob.compensate(error, error, threads=0),
        lambda: ob.add_parts(error, [bits], [1.0], threads=0),
        lambda: ob.encode(bits, error, 1.0, threads=0),
        lambda: ob.decode(error, bits, 1.0, threads=0),
    ):
        with pytest.raises(ValueError, match="threads is 0"):
            call()


PLAIN = """
#include "one_bit_loops.h"
int run(int what, size_t n, float *error, const void *x, int x_kind, const void *grad, int grad_kind, float keep,
        float take, uint8_t *bits, float scale, void *out, int out_kind, double *values) {
    const uint8_t *parts[2] = {bits, bits + n / 16};
    float weights[2] = {keep, take};
    mps_coding job = {what, error, {x, grad, x_kind, grad_kind, keep, take}, {parts, weights, 2}, bits, scale, out,
                      out_kind};
    mps_one_bit_init();
    return mps_code(&job, n, 1, values);
}
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The loops compiled without clones for vector levels: all steps by number."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "plain.c").write_text(PLAIN)
    command = ["cc", "-O1", "-DMPISPEED_NO_CLONES", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-I{INCLUDE}"]
    subprocess.run([*command, str(folder / "plain.c"), "-lm", "-o", str(folder / "plain.so")], check=True)
    run = ctypes.CDLL(str(folder / "plain.so")).run
    at, real, whole = ctypes.c_void_p, ctypes.c_float, ctypes.c_int
    run.argtypes = [whole, ctypes.c_size_t, at, at, whole, at, whole, real, real, at, real, at, whole, at]

    def call(what, error, x, grad, bits, out, scale=0.5, keep=0.9, take=0.1):
        values = (ctypes.c_double * 68)()
        kinds = [1 + FLOATS.index(t.dtype) for t in (x, grad, out)]
        count = run(what, error.numel(), error.data_ptr(), x.data_ptr(), kinds[0], grad.data_ptr(), kinds[1], keep,
                    take, bits.data_ptr(), scale, out.data_ptr(), kinds[2], values)  # fmt: skip
        return values[:count]

    return call


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_plain_loops_give_the_same_bits(plain, dtype):
    count = 5008
    for make in (make_values, make_wild):
        x, grad = make(count, dtype), make(count, dtype, seed=7)
        ours, out, bits = make(count, seed=8), torch.empty(count, dtype=dtype), make_bytes(count)
        theirs, theirs_out, theirs_bits = ours.clone(), out.clone(), bits.clone()
        squares = ob.compensate(ours, x, keep=0.9, grad=grad, take=0.1)
        assert same_sum(squares, plain(0, theirs, x, grad, theirs_bits, theirs_out))
        assert same(ours, theirs)
        squares = ob.add_parts(ours, [bits, bits.roll(-count // 16)], [0.9, 0.1])
        assert same_sum(squares, plain(1, theirs, x, grad, torch.cat([bits, bits]), theirs_out))
        assert same(ours, theirs)
        ob.encode(bits, ours, 0.5)
        plain(2, theirs, x, grad, theirs_bits, theirs_out)
        assert torch.equal(bits, theirs_bits)
        assert same(ours, theirs)
        ob.decode(out, bits, 0.5)
        plain(3, theirs, x, grad, theirs_bits, theirs_out)
        assert same(out, theirs_out)


def test_without_data_compensation_is_checked_alone():
    error, x = torch.zeros(16, device="meta"), torch.zeros(16, dtype=torch.bfloat16, device="meta")
    assert ob.compensate(error, x, keep=0.5, grad=x, take=0.5) == []
    with pytest.raises(ValueError, match="x has 15 elements but error has 16"):
        ob.compensate(error, x[:-1])
    with pytest.raises(TypeError, match="error has dtype"):
        ob.compensate(x, x)
