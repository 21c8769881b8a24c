"""A long integer in limbs that holds any sum of doubles exactly: adding two of them is adding their limbs.

The limbs are 64-bit integers of 32 bits each, so that more than 2^30 long integers can be added before a carry has to
be passed on. All that communication has to do with an exact sum is therefore one sum of integers of fixed length, which
has the same bits in any order.

Source: Kulisch, "Computer Arithmetic and Validity" (2013), the long accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpispeed.native import status

NUMBERS, UNIT = 66, -1088
"""Limbs with a value, and the power of two of the first: limb i counts units of 2^(32 i - 1088).

Doubles are from 2^-1074 to 2^1024; the last limb takes what their sums have above."""
INFINITIES, NANS, LIMBS = NUMBERS, NUMBERS + 1, NUMBERS + 2
"""Limbs that count what is not finite, and the number of all."""

_LIMB_BITS, _MANTISSA_BITS, _LEAST_EXPONENT = 32, 52, -1074
_LOW = (1 << _LIMB_BITS) - 1


def limbs_of(values: Iterable[float]) -> Tensor:
    """The exact sum of doubles, which is not below zero, in limbs. Shapes: [LIMBS], int64, on the host."""
    module = status.compiled("fp_sum")
    if module is None:
        return limbs_of_reference(values)
    limbs = torch.zeros(LIMBS, dtype=torch.int64)
    module.add_to_limbs(limbs.data_ptr(), list(values))
    return limbs


def limbs_of_reference(values: Iterable[float]) -> Tensor:
    """The same in Python's integers. Shapes: [LIMBS], int64, on the host."""
    limbs, total = torch.zeros(LIMBS, dtype=torch.int64), 0
    for value in values:
        if math.isfinite(value):
            above, below = value.as_integer_ratio()  # below is a power of two
            total += above << (1 - UNIT - below.bit_length())
        else:
            limbs[NANS if math.isnan(value) else INFINITIES] += 1
    top = _LIMB_BITS * (NUMBERS - 1)
    raw = np.frombuffer((total & ((1 << top) - 1)).to_bytes(top // 8, "little"), np.dtype("<u4"))
    limbs[: NUMBERS - 1] = torch.from_numpy(raw.astype(np.int64))
    limbs[NUMBERS - 1] = total >> top
    return limbs


def value_of(limbs: Tensor) -> float:
    """The double nearest to the sum in limbs on the host: what `math.fsum` gives; inf or NaN if any of them was.

    Shapes: limbs [LIMBS], or longer, contiguous.
    """
    module = status.compiled("fp_sum")
    if module is None:
        return value_of_reference(limbs)
    value: float = module.value_of_limbs(limbs.data_ptr())
    return value


def value_of_reference(limbs: Tensor) -> float:
    """The same in Python's integers. Shapes: limbs [LIMBS], or longer."""
    found: list[int] = limbs.tolist()
    if found[NANS]:
        return math.nan
    if found[INFINITIES]:
        return math.inf
    try:
        return sum(limb << (_LIMB_BITS * i) for i, limb in enumerate(found[:NUMBERS])) / (1 << -UNIT)
    except OverflowError:  # every part was finite
        return math.inf


def doubles_of(limbs: Tensor) -> list[float]:
    """Doubles of decreasing size with exactly the sum in limbs; an infinity, or NaN, stands alone.

    A sum beyond fp64 counts as an infinity. Waits for a device. Shapes: limbs [LIMBS].
    """
    found: list[int] = limbs.tolist()
    return split(found[:NUMBERS], UNIT, found[INFINITIES], found[NANS])


def split(numbers: Sequence[int], unit: int, infinities: int, nans: int) -> list[float]:
    """`doubles_of` limbs of 32 bits each, the first of which counts units of 2^unit."""
    if nans or infinities:
        return [math.nan if nans else math.inf]
    total, values = sum(limb << (_LIMB_BITS * i) for i, limb in enumerate(numbers)), []
    while total:
        shift = max(0, total.bit_length() - 1 - _MANTISSA_BITS, _LEAST_EXPONENT - unit)
        try:
            values.append(math.ldexp(total >> shift, shift + unit))
        except OverflowError:
            return [math.inf]
        total &= (1 << shift) - 1
    return values


def add_doubles(limbs: Tensor, values: Tensor) -> None:
    """Add non-negative doubles, infinities and NaN to limbs, where both are; nothing waits for a device.

    Fewer than 2^29 values between two calls of `carry`. Shapes: limbs [LIMBS], values [n].
    """
    bits = values.view(torch.int64)
    exponent, mantissa = (bits >> _MANTISSA_BITS) & 0x7FF, bits & ((1 << _MANTISSA_BITS) - 1)
    is_finite = exponent != 0x7FF
    limbs[INFINITIES] += (~is_finite & (mantissa == 0)).sum()
    limbs[NANS] += (~is_finite & (mantissa != 0)).sum()
    mantissa = torch.where(exponent > 0, mantissa | (1 << _MANTISSA_BITS), mantissa) * is_finite
    shift = exponent.clamp(min=1) - 1 + (_LEAST_EXPONENT - UNIT)
    at, offset = (shift >> 5) * is_finite, shift & 31
    low, high = (mantissa & _LOW) << offset, (mantissa >> _LIMB_BITS) << offset
    for first, part in ((at, low), (at + 1, high)):  # what would come after the last limb is 0
        limbs.index_add_(0, first, part & _LOW)
        limbs.index_add_(0, first + 1, part >> _LIMB_BITS)


def carry(limbs: Tensor) -> None:
    """Pass carries on by one limb each: all but the last are below 2^33 then. Shapes: limbs [LIMBS]."""
    numbers = limbs[: NUMBERS - 1]
    over = numbers >> _LIMB_BITS
    numbers &= _LOW
    limbs[1:NUMBERS] += over
