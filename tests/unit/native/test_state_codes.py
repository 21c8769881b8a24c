"""States in 8 and 16 bits: bits of the compiled loops beside the references, error bounds, means, corners."""

from __future__ import annotations

import math

import pytest
import torch

from mpispeed.native import state_codes as sc
from mpispeed.native import status
from mpispeed.native.cuda import philox
from tests.helpers.codes import plain, same, shifted, tiny, untouched, wild

LENGTHS = [0, 1, 255, 256, 257, 1023, 40_001]
HALVES = [torch.bfloat16, torch.float16]
TOP = {True: 127, False: 255}


def values(count, *, signed, make=plain, seed=0):
    x = make(count, seed=seed)
    return x if signed else x.abs()


def coded(x, offset=0, **how):
    """Codes and scales of x, in places that may be unaligned."""
    codes = shifted(torch.full((x.numel(),), 85, dtype=torch.uint8), offset)
    scales = shifted(torch.full((sc.scale_count(x.numel()),), -3.0), offset)
    sc.encode8(codes, scales, x, **how)
    assert untouched(codes, offset)
    assert untouched(scales, offset)
    return codes, scales


def decoded(codes, scales, **how):
    out = torch.full((codes.numel(),), 7.0)
    sc.decode8(out, codes, scales, **how)
    return out


def again(x, *, signed, **how):
    return decoded(*coded(x, signed=signed, **how), signed=signed)


def levels(signed):
    return torch.arange(TOP[signed] + 1, dtype=torch.float64).div(TOP[signed]).pow(4)


def test_the_compiled_module_is_the_one_under_test():
    assert status.compiled("state_codes") is not None


@pytest.mark.parametrize("seed", [None, 3, -(2**62) + 1])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_bytes_of_the_reference(signed, seed):
    for i, count in enumerate(LENGTHS):
        for make in (plain, tiny, wild):
            x = values(count, signed=signed, make=make)
            how = {"signed": signed, "seed": seed, "step": 2**33 + 5, "start": 130 * i + 2**36}
            wanted = torch.empty(count, dtype=torch.uint8), torch.empty(sc.scale_count(count))
            sc.encode8_reference(*wanted, x, **how)
            for offset, threads in ((0, 1), (i % 2, 3)):
                found = coded(shifted(x, offset), offset, threads=threads, **how)
                assert torch.equal(found[0], wanted[0]), (make, count)
                assert same(found[1], wanted[1]), (make, count)
                values_of = torch.empty(count)
                sc.decode8_reference(values_of, *wanted, signed=signed)
                assert same(decoded(*found, signed=signed, threads=threads), values_of)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_level_is_taken(signed):
    x = values(4096, signed=signed)
    codes, scales = coded(x, signed=signed)
    assert torch.equal(scales, x.abs().view(-1, 256).amax(1))
    share = (x.abs().double().view(-1, 256) / scales.double().view(-1, 1)).view(-1, 1)
    wanted = (share - levels(signed)).abs().argmin(1)
    if not signed:
        wanted = torch.where((wanted == 0) & (x > 0), 1, wanted)
    size = codes.view(torch.int8).abs() if signed else codes
    assert torch.equal(size.long(), wanted)
    signs = decoded(codes, scales, signed=signed).sign()
    assert torch.equal(signs, torch.where(wanted > 0, x.sign(), 0.0))


@pytest.mark.parametrize(
    ("signed", "decades", "bound"), [(True, 3, 0.1), (True, 5, 0.27), (False, 4, 0.08), (False, 7, 0.4)]
)
def test_relative_errors_are_small_over_many_decades(signed, decades, bound):
    """Neighbours are apart by 4 / code; at 10^-d of the scale the code is top * 10^(-d / 4)."""
    x = torch.logspace(-decades, 0, 256)
    error = (again(x, signed=signed) / x - 1).abs()
    assert error.max() < bound


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("make", [plain, tiny])
@pytest.mark.parametrize("signed", [True, False])
def test_decoded_values_have_the_same_codes_and_scales(signed, make, seed):
    first = coded(values(5000, signed=signed, make=make), signed=signed)
    second = coded(decoded(*first, signed=signed), signed=signed, seed=seed)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_its_own_nearest(signed):
    for scale in (1.0, 0.7, 2.0**-94, 3e38):
        codes = torch.arange(256, dtype=torch.uint8)
        codes[128] = TOP[signed]  # -128 is no code
        once = decoded(codes, torch.tensor([scale]), signed=signed)
        for seed in (None, 1):
            found, scales = coded(once, signed=signed, seed=seed)
            assert torch.equal(found, codes)
            assert scales.item() == torch.tensor(scale).item()


@pytest.mark.parametrize("signed", [True, False])
def test_corners_of_blocks(signed):
    x = torch.zeros(6 * 256)
    x[256 + 7] = 3e38  # alone in its block
    x[2 * 256] = math.inf
    x[3 * 256 + 255] = math.nan
    x[4 * 256 : 5 * 256] = 1e-42  # subnormal throughout
    x[5 * 256 :] = 1e-30  # below the smallest scale
    x[5 * 256] = -0.0
    codes, scales = coded(x, signed=signed)
    found = decoded(codes, scales, signed=signed)
    assert not found[:256].any()
    assert scales[0] == 0
    assert torch.equal(found[256:512], x[256:512])
    assert found[2 * 256 : 4 * 256].isnan().all()
    assert (found[4 * 256 : 5 * 256] == (0.0 if signed else 2.0**-94 * levels(False)[1].float())).all()
    assert found[5 * 256] == 0
    assert ((found[5 * 256 + 1 :] / 1e-30 - 1).abs() < 0.2).all()


def test_without_a_sign_nothing_positive_becomes_zero_and_nothing_negative_is_hidden():
    x = torch.logspace(-44, 38, 512)
    x[::2] = 1.0
    for seed in (None, 9):
        assert (again(x, signed=False, seed=seed) > 0).all()
    x[300] = -1e-44
    found = again(x, signed=False)
    assert found[256:].isnan().all()
    assert not found[:256].isnan().any()


@pytest.mark.parametrize("signed", [True, False])
def test_random_codes_have_the_value_for_their_mean(signed):
    """The mean of n rounded values is off by a step over 2 sqrt(n), times a few."""
    one = torch.full((256,), 0.0137)
    one[0] = 1.0
    found = torch.stack([again(one, signed=signed, seed=4, step=k)[1:] for k in range(2000)])
    low, high = found.min(), found.max()
    assert low < 0.0137 < high
    assert len(found.unique()) == 2
    assert abs(found.double().mean() - one[1].double()) < 5 * (high - low) / 2 / math.sqrt(found.numel())
    of_each = found.double().mean(0)
    assert (of_each - one[1].double()).abs().max() < 5 * (high - low) / 2 / math.sqrt(2000)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_random_rounding_has_the_bits_of_the_reference(dtype):
    for i, count in enumerate(LENGTHS):
        for make in (plain, wild, tiny, lambda n, seed: plain(n, seed=seed) * 2.0**-16):
            x = make(count, seed=i)
            how = {"seed": 2**63 + 11, "step": 7, "start": 77 * i + 2**34}
            wanted = torch.empty(count, dtype=dtype)
            sc.round_stochastic_reference(wanted, x, **how)
            for offset, threads in ((0, 1), (1, 3)):
                found = shifted(torch.zeros(count, dtype=dtype), offset)
                sc.round_stochastic(found, shifted(x, offset), threads=threads, **how)
                assert same(found, wanted), (count, make)
                assert untouched(found, offset)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_random_rounding_takes_a_neighbour_and_has_the_value_for_its_mean(dtype):
    count = 1 << 18
    for value in (1.00123, -3.7e-3, 6.1e-7, 1e-41 if dtype == torch.bfloat16 else 2.3e-8):
        x, out = torch.full((count,), value), torch.empty(count, dtype=dtype)
        sc.round_stochastic(out, x, seed=1, step=2, start=0)
        low, high = out.min().double(), out.max().double()
        assert low < x[0].double() < high
        assert len(out.unique()) == 2
        share = (x[0].double() - low) / (high - low)
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs((out.double().mean() - low) / (high - low) - share) < 5 * deviation + 2.0**-17


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_random_rounding_keeps_what_is_exact_and_never_makes_infinities(dtype):
    exact = wild(20_000, dtype, special=0.1)
    found = torch.empty_like(exact)
    sc.round_stochastic(found, exact.float(), seed=1, step=1)
    assert same(found, exact)
    most = torch.finfo(dtype).max
    x = torch.full((4096,), most).nextafter(torch.tensor(math.inf))
    found = torch.empty(4096, dtype=dtype)
    sc.round_stochastic(found, x, seed=1, step=1)
    assert (found == most).all()
    sc.round_stochastic(found, -x, seed=1, step=1)
    assert (found == -most).all()
    sc.round_stochastic(found, torch.full((4096,), torch.finfo(torch.float32).max), seed=1, step=1)
    assert found.isinf().all()


@pytest.mark.parametrize("start", [0, 1, 127, 256, 640])
def test_bits_belong_to_elements_and_not_to_ranges(start):
    x, how = plain(2048), {"seed": 5, "step": 3}
    whole, part = torch.empty(2048, dtype=torch.bfloat16), torch.empty(300, dtype=torch.bfloat16)
    sc.round_stochastic(whole, x, **how)
    sc.round_stochastic(part, x[start : start + 300].clone(), start=start, **how)
    assert same(part, whole[start : start + 300])
    cut = start // 256 * 256
    codes, _ = coded(x, signed=True, **how)
    found, _ = coded(x[cut : cut + 512].clone(), signed=True, start=cut, **how)
    assert torch.equal(found, codes[cut : cut + 512])
    for other in ({"seed": 6, "step": 3}, {"seed": 5, "step": 4}, {"seed": 5, "step": 3, "start": 256}):
        sc.round_stochastic(part, x[:300].clone(), **{"start": 0, **other})
        assert not same(part, whole[:300])


def test_halves_of_counters_are_those_of_the_words():
    """Element r of a run has half r // 16 of counter r % 16, low halves first."""
    words = philox.words(99, 64).view(16, 4)
    found = philox.halves(99, 0, 0, 128)
    for r in range(128):
        assert found[r] == words[r % 16, r // 32] >> 16 * (r // 16 % 2) & 0xFFFF
    assert torch.equal(philox.halves(99, 0, 100, 300), philox.halves(99, 0, 0, 400)[100:])
    assert not torch.equal(philox.halves(99, 1, 0, 128), found)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_pairs_are_the_nearest_and_the_rest(dtype):
    for count in LENGTHS:
        for make in (plain, tiny, wild):
            x = make(count)
            high, low, again_high, again_low = (torch.zeros(count, dtype=dtype) for _ in range(4))
            sc.split(high, low, x, threads=3)
            assert same(high, x.to(dtype))
            wanted = torch.where(high.isfinite(), x - high.float(), 0.0).to(dtype)
            assert same(low, wanted)
            out, twice = torch.empty(count), torch.empty(count)
            sc.join(out, high, low, threads=2)
            assert same(out, high.float() + low.float())
            sc.split(again_high, again_low, out)
            sc.join(twice, again_high, again_low)
            assert same(twice.abs(), out.abs())  # but for signs of zeros
            assert torch.equal(twice.nan_to_num(), out.nan_to_num())
    x = plain(4096).abs().clamp_min(2.0**-8)
    high, low, out = torch.empty(4096, dtype=dtype), torch.empty(4096, dtype=dtype), torch.empty(4096)
    sc.split(high, low, x)
    sc.join(out, high, low)
    # Half of a half of 2**-8; of fp16, where what is left may be subnormal, half of 2**-24.
    assert ((out - x).abs() <= x * 2.0**-17).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_plain_halves_are_those_of_torch(dtype):
    for count in LENGTHS:
        x = wild(count)
        half, out = torch.empty(count, dtype=dtype), torch.empty(count)
        sc.encode16(half, x, threads=2)
        assert same(half, x.to(dtype))
        sc.decode16(out, half, threads=2)
        assert same(out, half.float())


def test_without_the_compiled_module_references_run(monkeypatch):
    x = values(1000, signed=False)
    halves = [torch.empty(1000, dtype=torch.bfloat16) for _ in range(4)]
    out = torch.empty(1000)

    def run():
        sc.round_stochastic(halves[0], x, seed=1, step=1)
        sc.encode16(halves[1], x)
        sc.split(halves[2], halves[3], x)
        sc.join(out, halves[2], halves[3])
        found = [*coded(x, signed=False, seed=2), *(half.clone() for half in halves), out.clone()]
        sc.decode16(out, halves[1])
        return [*found, out.clone(), decoded(*found[:2], signed=False)]

    wanted = run()
    monkeypatch.setattr(status, "compiled", lambda name: None)
    assert all(same(a, b) if a.is_floating_point() else torch.equal(a, b) for a, b in zip(run(), wanted, strict=True))


def test_flushing_subnormals_changes_no_code():
    x = torch.cat([tiny(4096), plain(4096) * 2.0**-100])
    plainly = [coded(x.abs(), signed=False, seed=1), coded(x, signed=True, seed=1)]
    half, flushed = torch.empty(8192, dtype=torch.float16), torch.empty(8192, dtype=torch.float16)
    sc.round_stochastic(half, x, seed=1, step=1)
    assert torch.set_flush_denormal(True)
    try:
        found = [coded(x.view(torch.int32).bitwise_and(0x7FFFFFFF).view(torch.float32), signed=False, seed=1)]
        found.append(coded(x, signed=True, seed=1))
        sc.round_stochastic(flushed, x, seed=1, step=1)
    finally:
        torch.set_flush_denormal(False)
    for ours, wanted in zip(found, plainly, strict=True):
        assert torch.equal(ours[0], wanted[0])
        assert torch.equal(ours[1], wanted[1])
    assert same(half, flushed)


def test_tensors_on_meta_are_checked_and_no_more():
    x, codes, scales = (torch.empty(n, dtype=d, device="meta") for n, d in (
        (300, torch.float32), (300, torch.uint8), (2, torch.float32)))  # fmt: skip
    sc.encode8(codes, scales, x, signed=True)
    sc.decode8(x, codes, scales, signed=True)
    sc.encode16(torch.empty(300, dtype=torch.float16, device="meta"), x)
    sc.round_stochastic(torch.empty(300, dtype=torch.float16, device="meta"), x, seed=1, step=1)


def test_what_does_not_fit_is_refused():
    x, codes, scales = torch.zeros(300), torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    half = torch.zeros(300, dtype=torch.bfloat16)
    for wrong, message in (
        (lambda: sc.encode8(codes, scales[:1], x, signed=True), "1 scales for 300 elements"),
        (lambda: sc.encode8(codes[1:], scales, x, signed=True), "elements"),
        (lambda: sc.encode8(codes, scales, x, signed=True, threads=0), "threads"),
        (lambda: sc.encode8(codes, scales, x, signed=True, seed=1, step=-1), "step -1"),
        (lambda: sc.encode8(codes, x[:2], x, signed=True), "share memory"),
        (lambda: sc.decode8(x[::2], codes[:150], scales[:1], signed=True), "strides"),
        (lambda: sc.round_stochastic(half, x, seed=1, step=1, start=-5), "start -5"),
        (lambda: sc.split(half, half, x), "share memory"),
        (lambda: sc.encode16(half.to("meta"), x), "meta"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    for wrong, message in (
        (lambda: sc.encode8(codes.view(torch.int8), scales, x, signed=True), "int8"),
        (lambda: sc.encode8(codes, scales, half, signed=True), "bfloat16"),
        (lambda: sc.encode16(x.double(), x), "float64"),
        (lambda: sc.join(x, half, half.to(torch.float16)), "one dtype"),
    ):
        with pytest.raises(TypeError, match=message):
            wrong()
