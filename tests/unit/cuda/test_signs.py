"""Packed signs of the kernels, run on the host, are the bits of the host loops; squares have the same exact sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mpispeed.native import device_signs, status
from mpispeed.native import one_bit as ob
from mpispeed.native.cuda import launcher
from tests.helpers.codes import FLOATS, bytes_of, plain, same, same_sum, shifted, untouched, wild
from tests.helpers.cuda_host import HostLauncher

LENGTHS = [1, 7, 8, 255, 256, 257, 1021, 2048, 5000]
WHOLE = [8, 248, 256, 264, 512, 1000, 4104, 5000]  # bytes are whole
FACTORS = [0.25, 1e-40, 3.0, math.inf, 1.7, 2.0**120, 0.0]


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def kernels(request):
    return HostLauncher(is_reversed=request.param)


def test_the_host_loops_are_there():
    assert status.compiled("one_bit") is not None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_compensate_gives_the_bits_of_the_host(kernels, dtype):
    for i, count in enumerate(LENGTHS):
        offset = i % 3
        for special in (0, 0.002):
            x, host = wild(count, dtype, special=special), plain(count, seed=5)
            ours = shifted(host, offset)
            squares = ob.compensate(host, x, keep=0.9)
            with launcher.standing_in(kernels):
                assert same_sum(ob.compensate(ours, shifted(x, offset), keep=0.9), squares)
            assert same(ours, host)
            assert untouched(ours, offset)
        for grad_dtype in FLOATS:
            grad, host = plain(count, grad_dtype, seed=6), plain(count, seed=7)
            ours = shifted(host, offset)
            squares = ob.compensate(host, x, keep=0.9, grad=grad, take=0.1)
            with launcher.standing_in(kernels):
                found = ob.compensate(ours, shifted(x, offset), keep=0.9, grad=shifted(grad, offset), take=0.1)
            assert same_sum(found, squares)
            assert same(ours, host)
    assert set(kernels.launched) == {f"sign_mix_{x}{g}" for x in _tags(dtype) for g in ("", "_f32", "_bf16", "_fp16")}


def _tags(dtype):
    return [{torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]]


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-23, 1.0, 1e19, 3e38])
def test_squares_of_any_size_are_summed_without_rounding(monkeypatch, kernels, size):
    """Walking blocks: each of the two goes over several tiles."""
    count = 256 * 64 * 5 + 77
    x = (plain(count) * size).clamp(-3e38, 3e38)
    monkeypatch.setattr(kernels, "processors", 1)
    monkeypatch.setattr(device_signs, "_BLOCKS_OF_PROCESSOR", 2)
    error = torch.zeros(count)
    with launcher.standing_in(kernels):
        found = ob.compensate(error, x)
    assert same_sum(found, ob.compensate(torch.zeros(count), x))
    exact = math.fsum(math.fsum(tile.double().square().tolist()) for tile in x.split(256))
    assert math.fsum(found) == pytest.approx(exact, rel=1e-13)  # 256 roundings of fp64 in a tile


def test_infinities_and_nans_are_told_apart(kernels):
    for values, wanted in (([math.inf], math.inf), ([math.nan], math.nan), ([math.inf, math.nan], math.nan)):
        x = torch.zeros(600)
        x[: len(values)] = torch.tensor(values)
        with launcher.standing_in(kernels):
            assert ob.compensate(torch.zeros(600), x) == pytest.approx([wanted], nan_ok=True)
    with launcher.standing_in(kernels):
        assert ob.compensate(torch.zeros(600), torch.zeros(600)) == []


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_sums_of_parts_give_the_bits_of_the_host(kernels, number):
    for i, count in enumerate(WHOLE):
        parts, host = [bytes_of(count, seed) for seed in range(number)], wild(count, seed=4)
        ours = shifted(host, i % 3)
        squares = ob.add_parts(host, parts, FACTORS[:number])
        with launcher.standing_in(kernels):
            found = ob.add_parts(ours, [shifted(part, i % 3) for part in parts], FACTORS[:number])
        assert same_sum(found, squares)
        assert same(ours, host)
        assert untouched(ours, i % 3)


def test_more_parts_than_one_launch_takes():
    number, kernels = device_signs.MOST_PARTS + 1, HostLauncher()
    parts, weights = [bytes_of(264, seed) for seed in range(number)], [1.0 / (i + 1) for i in range(number)]
    for count in (number, number - 1):
        host, ours = plain(264), plain(264)
        squares = ob.add_parts(host, parts[:count], weights[:count])
        with launcher.standing_in(kernels):
            assert same_sum(ob.add_parts(ours, parts[:count], weights[:count]), squares)
        assert same(ours, host)
    assert kernels.launched == ["sign_sum"]  # the longer one is a work of the reference


@pytest.mark.parametrize("scale", [0.0, 1e-41, 0.7, 2.0**127, math.inf, math.nan])
def test_encode_gives_the_bits_of_the_host_and_of_packbits(kernels, scale):
    for i, count in enumerate(WHOLE):
        for make in (plain, wild):
            host = make(count)
            wanted, ours = np.packbits(host.numpy() >= 0), shifted(host, i % 3)
            bits, host_bits = shifted(torch.zeros(count // 8, dtype=torch.uint8), i % 5), bytes_of(count)
            ob.encode(host_bits, host, scale)
            with launcher.standing_in(kernels):
                ob.encode(bits, ours, scale)
            assert np.array_equal(bits.numpy(), wanted)
            assert torch.equal(bits, host_bits)
            assert same(ours, host)
            assert untouched(bits, i % 5)
            assert untouched(ours, i % 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_decode_gives_the_bits_of_the_host(dtype):
    kernels = HostLauncher()
    for i, count in enumerate(LENGTHS):
        for scale in (0.0, 1e-41, 0.7, 2.0**127, math.inf, math.nan):
            bits, host = bytes_of(count), torch.empty(count, dtype=dtype)
            ours = shifted(torch.empty(count, dtype=dtype), i % 3)
            ob.decode(host, bits, scale)
            with launcher.standing_in(kernels):
                ob.decode(ours, shifted(bits, i % 5), scale)
            assert same(ours, host)
            assert untouched(ours, i % 3)


def test_nothing_is_launched_for_nothing():
    kernels, none, bits = HostLauncher(), torch.empty(0), torch.empty(0, dtype=torch.uint8)
    with launcher.standing_in(kernels):
        assert ob.compensate(none, none) == ob.add_parts(none, [bits], [1.0]) == []
        ob.encode(bits, none, 1.0)
        ob.decode(none, bits, 1.0)
    assert not kernels.launched


def test_one_scale_and_the_kept_error_bring_the_mean_back(kernels):
    """Error feedback as the optimizers use it: the sum of what is sent nears the sum of what was meant."""
    x, error, sent = plain(1024), torch.zeros(1024), torch.zeros(1024)
    bits, out = torch.zeros(128, dtype=torch.uint8), torch.empty(1024)
    with launcher.standing_in(kernels):
        for _ in range(20):
            scale = ob.scale_of(ob.compensate(error, x), 1024)
            ob.encode(bits, error, scale)
            ob.decode(out, bits, scale)
            sent += out
    # what is missing is in the error; 20 roundings of numbers below 2^9
    assert (sent.double() + error.double() - 20 * x.double()).abs().max() < 2e-3
