"""CRC-32C against published values, a bit-by-bit reference, and the combine rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mpispeed.native import status
from mpispeed.native.checksum import crc32c, crc32c_combine, crc32c_combine_reference, crc32c_reference

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 55, 1023, 1024, 1025, 3071, 3072, 3073, 6144, 10007, 2**17 + 3]
# check values of RFC 3720, appendix B.4, and of the catalogue of CRC algorithms
KNOWN = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def bitwise_crc(data, value=0):
    crc = value ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(("data", "crc"), KNOWN)
def test_published_values(data, crc):
    module = status.require("crc32c")
    assert crc32c(data) == crc
    assert crc32c_reference(data) == crc
    assert module.update(data, 0, True) == crc


@pytest.mark.parametrize("count", SIZES)
def test_every_path_agrees_with_the_bits(count):
    data = random.Random(count).randbytes(count)
    expected = bitwise_crc(data) if count < 20_000 else crc32c_reference(data)
    module = status.require("crc32c")
    assert crc32c(data) == expected
    assert crc32c_reference(data) == expected
    assert module.update(data, 0, True) == expected


@pytest.mark.parametrize("offset", range(9))
def test_unaligned_starts(offset):
    data = random.Random(0).randbytes(5000)
    assert crc32c(memoryview(data)[offset:]) == bitwise_crc(data[offset:])


@pytest.mark.parametrize("cut", [0, 1, 8, 1000, 4999, 5000])
def test_continuing_and_combining_equal_the_whole(cut):
    data = random.Random(1).randbytes(5000)
    first, second = data[:cut], data[cut:]
    assert crc32c(second, crc32c(first)) == crc32c(data)
    assert crc32c_reference(second, crc32c_reference(first)) == crc32c(data)
    for combine in (crc32c_combine, crc32c_combine_reference):
        assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(data)


def test_combine_with_lengths_beyond_memory():
    for length in (2**31, 2**33 + 5, 2**40 - 1):
        assert crc32c_combine(0x12345678, 0x9ABCDEF0, length) == crc32c_combine_reference(
            0x12345678, 0x9ABCDEF0, length
        )


def test_kinds_of_buffers():
    array = np.arange(1000, dtype=np.float32)
    expected = bitwise_crc(array.tobytes())
    tensor = torch.from_numpy(array)
    for buffer in (array, array.tobytes(), bytearray(array.tobytes()), memoryview(array), tensor, tensor.view(10, 100)):
        assert crc32c(buffer) == expected
        assert crc32c_reference(buffer) == expected
    halves = tensor.bfloat16()
    assert crc32c(halves) == bitwise_crc(halves.view(torch.uint8).numpy().tobytes())
    assert crc32c(torch.empty(0)) == 0
    assert crc32c_reference(torch.empty(0)) == 0


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="not a 32-bit checksum"):
        crc32c(b"abc", 2**32)
    with pytest.raises(ValueError, match="not a 32-bit checksum"):
        crc32c_combine(-1, 0, 5)
    with pytest.raises(ValueError, match="length2 is -5"):
        crc32c_combine(1, 0, -5)
    with pytest.raises(ValueError, match="strides"):
        crc32c(torch.zeros(10)[::2])
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        crc32c(np.zeros(10)[::2])
    with pytest.raises(TypeError):
        crc32c("text")


def test_missing_module_runs_the_twin(monkeypatch):
    expected = crc32c(b"123456789" * 100)
    monkeypatch.setattr(status, "compiled", lambda name: None)
    assert crc32c(b"123456789" * 100) == expected
    assert crc32c_combine(crc32c(b"12345"), crc32c(b"6789"), 4) == 0xE3069283
