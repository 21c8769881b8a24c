"""CRC-32 of joined ranges, from the checksums of both; as `crc32_combine` of zlib, which Python does not have."""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # bits reversed: bit 31 is x^0
_ONE = 0x80000000


def combine(crc1: int, crc2: int, length2: int) -> int:
    """Checksum of A followed by B, from the checksums of A and B and the length of B in bytes."""
    return _times(crc1, _shift(length2)) ^ crc2


def _times(a: int, b: int) -> int:
    """Product of polynomials modulo that of the checksum."""
    product = 0
    for bit in range(32):
        if b & (_ONE >> bit):
            product ^= a
        a = (a >> 1) ^ _POLYNOMIAL if a & 1 else a >> 1
    return product


@lru_cache(64)
def _shift(length: int) -> int:
    """The power x^(8 length)."""
    factor, power = _ONE, _ONE >> 8
    while length:
        if length & 1:
            factor = _times(factor, power)
        power = _times(power, power)
        length >>= 1
    return factor
