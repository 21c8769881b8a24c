"""Packed signs of a GPU are the bits of the host loops; squares have the same exact sum."""

from __future__ import annotations

import math

import pytest
import torch

from mpispeed.native import one_bit as ob
from tests.helpers.codes import FLOATS, bytes_of, plain, same, same_sum, shifted, untouched, wild

LENGTHS = [0, 1, 7, 8, 255, 256, 257, 5000, 1_000_003]
WHOLE = [0, 8, 248, 264, 1000, 4104, 1_000_000]
SCALES = [0.0, 1e-41, 0.7, 2.0**127, math.inf, math.nan]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_compensate_gives_the_bits_of_the_host(device, dtype):
    for i, count in enumerate(LENGTHS):
        for special in (0, 0.002):
            x, host = wild(count, dtype, special=special), plain(count, seed=5)
            ours = shifted(host, i % 3, device)
            squares = ob.compensate(host, x, keep=0.9)
            assert same_sum(ob.compensate(ours, shifted(x, i % 3, device), keep=0.9), squares)
            assert same(ours, host)
            assert untouched(ours, i % 3)
        for grad_dtype in FLOATS:
            grad, host = plain(count, grad_dtype, seed=6), plain(count, seed=7)
            ours = shifted(host, i % 3, device)
            squares = ob.compensate(host, x, keep=0.9, grad=grad, take=0.1)
            found = ob.compensate(
                ours, shifted(x, i % 3, device), keep=0.9, grad=shifted(grad, i % 3, device), take=0.1
            )
            assert same_sum(found, squares)
            assert same(ours, host)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 64, 256, 257])
def test_sums_of_parts_give_the_bits_of_the_host(device, number):
    weights = [0.25, 1e-40, 3.0, 1.7, 2.0**120, 0.0] * 43
    for i, count in enumerate(WHOLE[:-1] if number > 8 else WHOLE):
        parts, host = [bytes_of(count, seed) for seed in range(number)], wild(count, seed=4)
        ours = shifted(host, i % 3, device)
        squares = ob.add_parts(host, parts, weights[:number])
        found = ob.add_parts(ours, [shifted(part, i % 3, device) for part in parts], weights[:number])
        assert same_sum(found, squares)
        assert same(ours, host)
        assert untouched(ours, i % 3)


@pytest.mark.parametrize("scale", SCALES)
def test_encode_gives_the_bits_of_the_host(device, scale):
    for i, count in enumerate(WHOLE):
        for make in (plain, wild):
            host = make(count)
            ours, bits = shifted(host, i % 3, device), shifted(bytes_of(count), i % 5, device)
            host_bits = bytes_of(count)
            ob.encode(host_bits, host, scale)
            ob.encode(bits, ours, scale)
            assert torch.equal(bits.cpu(), host_bits)
            assert same(ours, host)
            assert untouched(bits, i % 5)
            assert untouched(ours, i % 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_decode_gives_the_bits_of_the_host(device, dtype):
    for i, count in enumerate(LENGTHS):
        for scale in SCALES:
            bits, host = bytes_of(count), torch.empty(count, dtype=dtype)
            ours = shifted(host, i % 3, device)
            ob.decode(host, bits, scale)
            ob.decode(ours, shifted(bits, i % 5, device), scale)
            assert same(ours, host)
            assert untouched(ours, i % 3)


def test_twins_on_the_device_give_the_bits_too(device):
    x, error = plain(4104).to(device), plain(4104, seed=1).to(device)
    other, bits = error.clone(), [torch.zeros(513, dtype=torch.uint8, device=device) for _ in range(2)]
    assert same_sum(ob.compensate(error, x), ob.compensate_reference(other, x))
    ob.encode(bits[0], error, 0.7)
    ob.encode_reference(bits[1], other, 0.7)
    assert torch.equal(*bits)
    assert same(error, other)
