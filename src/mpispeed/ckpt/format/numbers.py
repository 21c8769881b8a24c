"""Conversion of stored elements to numbers that numpy computes with. No torch."""

from __future__ import annotations

from functools import cache

import numpy as np

from mpispeed.base.errors import CheckpointError

#: dtype name -> (bits of the exponent, bits of the fraction, bias, is there an infinity, is there a signed zero)
_SMALL = {
    "float8_e4m3fn": (4, 3, 7, False, True),
    "float8_e5m2": (5, 2, 15, True, True),
    "float8_e4m3fnuz": (4, 3, 8, False, False),
    "float8_e5m2fnuz": (5, 2, 16, False, False),
}


def as_numbers(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The values of stored elements: bf16 and float8 as float32, everything else as it is.

    Args:
        stored: of the storage dtype of the format.
        dtype: name of the dtype in the format.

    Formats: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0 (e8m0).
    """
    if dtype == "bfloat16":
        wide: np.ndarray = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    if dtype.startswith("float8"):
        looked_up: np.ndarray = _table(dtype)[stored]
        return looked_up
    return stored


def is_float(dtype: str) -> bool:
    """True if elements of this dtype are real numbers with a fraction."""
    return dtype.startswith(("float", "bfloat"))


@cache
def _table(dtype: str) -> np.ndarray:
    codes = np.arange(256, dtype=np.int64)
    if dtype == "float8_e8m0fnu":
        values = np.ldexp(1.0, codes - 127)
        values[255] = np.nan
        powers: np.ndarray = values.astype(np.float32)
        return powers
    if dtype not in _SMALL:
        msg = f"elements of {dtype} cannot be read as numbers"
        raise CheckpointError(msg)
    exponent_bits, fraction_bits, bias, has_infinity, has_signed_zero = _SMALL[dtype]
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent = (codes >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    is_subnormal = exponent == 0
    scale = np.ldexp(1.0, np.where(is_subnormal, 1, exponent) - bias)
    values = sign * scale * np.where(is_subnormal, fraction, 1 + fraction)
    top = exponent == (1 << exponent_bits) - 1
    if has_infinity:
        values[top & (fraction == 0)] = (sign * np.inf)[top & (fraction == 0)]
        values[top & (fraction > 0)] = np.nan
    elif has_signed_zero:
        values[top & (codes & 7 == 7)] = np.nan
    else:
        values[0x80] = np.nan
    small: np.ndarray = values.astype(np.float32)
    return small
