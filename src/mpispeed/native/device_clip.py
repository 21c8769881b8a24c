"""The norm of gradients and the factor of their update, from the limbs of their squares, without leaving the device.

The bits are those of the host: the sum is rounded once to fp64, as `math.fsum` does, and what follows is fp64.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from mpispeed.native import exact_sum
from mpispeed.native.cuda.launcher import for_tensor

_BITS = 53
_STEP = 32


def norm_and_factor(limbs: Tensor, *, scale: float = 1.0, limit: float = 0.0) -> tuple[Tensor, Tensor]:
    """The norm of gradients, unscaled, and what an update multiplies them by; both stay on the device.

    The norm is sqrt(sum) / scale, the factor min(1, limit / (norm + 1e-6)) / scale, without a limit 1 / scale. Where
    the sum is not finite the norm is it, and the factor is NaN, with which an update does nothing.

    Args:
        limbs: of the sum of squares, as `exact_sum` has them, each below 2^62.
        scale: of the loss, above 0.
        limit: above which gradients are clipped; 0: never.

    Shapes: limbs [exact_sum.LIMBS]; the norm [1] in fp64, the factor [1] in fp32.
    """
    launcher = for_tensor(limbs)
    if launcher is None:
        return norm_and_factor_reference(limbs, scale=scale, limit=limit)
    norm = torch.empty(1, dtype=torch.float64, device=limbs.device)
    factor = torch.empty(1, dtype=torch.float32, device=limbs.device)
    launcher.launch(
        "norm_and_factor", (1, 1, 1), (32, 1, 1), limbs.data_ptr(), norm.data_ptr(), factor.data_ptr(),
        struct.pack("dd", scale, limit),
    )  # fmt: skip
    return norm, factor


@torch.no_grad()
def norm_and_factor_reference(limbs: Tensor, *, scale: float = 1.0, limit: float = 0.0) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    total = rounded(limbs)
    is_finite = torch.isfinite(total)
    divisor = torch.full_like(total, scale)  # a tensor: a device multiplies by the reciprocal of a number
    norm = torch.where(is_finite, _root(total) / divisor, total)
    factor = torch.full_like(norm, limit) / (norm + 1e-6) if limit > 0 else torch.ones_like(norm)
    factor = torch.where(is_finite, factor.clamp(max=1.0) / divisor, torch.full_like(norm, torch.nan))
    return norm, factor.to(torch.float32)


def _root(x: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's own can be one bit off on the host.

    The residue x - s s is exact (Dekker 1971); with the middle m between s and a neighbour, it tells x from m m.
    """
    one = torch.ones_like(x)  # the residue has to be within the doubles
    unit = torch.where(x < 2.0**-500, one * 2.0**200, torch.where(x > 2.0**500, one * 2.0**-200, one))
    x = x * unit
    s = x.sqrt()
    high = s * (2.0**27 + 1)
    high = high - (high - s)
    low, square = s - high, s * s
    residue = (x - square) - ((high * high - square) + 2.0 * high * low + low * low)
    below, above = (torch.nextafter(s, torch.full_like(s, end)) for end in (0.0, torch.inf))
    down, up = s - below, above - s
    is_below, is_above = residue + s * down < down * down / 4, residue - s * up > up * up / 4
    s = torch.where((s > 0) & is_below, below, torch.where((s > 0) & is_above, above, s))
    return torch.where(unit > 1, s * 2.0**-100, torch.where(unit < 1, s * 2.0**100, s))


def rounded(limbs: Tensor) -> Tensor:
    """The double nearest to the sum in limbs, to even in the middle; inf or NaN if any part was. Waits for nothing.

    Shapes: limbs [exact_sum.LIMBS]; the result [1].
    """
    numbers, count = limbs[: exact_sum.NUMBERS].clone(), exact_sum.NUMBERS
    for i in range(count - 1):
        numbers[i + 1] += numbers[i] >> _STEP
    # The last limb takes 63 bits: two more make all of them 32 bits long.
    numbers[: count - 1] &= (1 << _STEP) - 1
    top = numbers[count - 1 :]
    numbers = torch.cat([numbers[: count - 1], top & ((1 << _STEP) - 1), top >> _STEP])
    places = torch.arange(count + 1, device=limbs.device)
    # The highest limb that is not 0, the two below it, and whether anything is below these.
    at = torch.where(numbers != 0, places, torch.zeros_like(places)).max().view(1)
    first, second, third = (
        torch.where(at >= k, numbers.gather(0, (at - k).clamp(min=0)), torch.zeros_like(at)) for k in range(3)
    )
    rest = (torch.where(places < at - 2, numbers, torch.zeros_like(numbers)) != 0).any()
    # 62 bits of them: with 53 to keep, there are 9 and more to round by.
    length = torch.frexp(first.double())[1].to(torch.int64)  # bits of the highest, 0 to 32
    taken = 62 - length  # of the lower ones, from 30 to 62
    low = (taken - _STEP).clamp(min=0)  # of the third one
    short = (_STEP - taken).clamp(min=0)  # of the second one, what is left out
    value = (first << taken) | torch.where(taken >= _STEP, second << low, second >> short) | (third >> (_STEP - low))
    lost = (second & ((1 << short) - 1)) | (third & ((1 << (_STEP - low)) - 1)) | rest
    unit = exact_sum.UNIT + _STEP * at - taken  # the value counts units of 2^this
    total = _to_double(value | (lost != 0), unit)
    nans, infinities = limbs[exact_sum.NANS :][:1], limbs[exact_sum.INFINITIES :][:1]
    total = torch.where(infinities != 0, torch.full_like(total, torch.inf), total)
    return torch.where(nans != 0, torch.full_like(total, torch.nan), total)


def _to_double(value: Tensor, unit: Tensor) -> Tensor:
    """Round integers of 62 bits, the last of which stands for all that is below, times 2^unit."""
    # What is below the least double cannot be: sums are of doubles. So 53 bits are kept, or fewer near 0, exactly.
    kept = value >> (62 - _BITS)
    below, half = value & ((1 << (62 - _BITS)) - 1), 1 << (61 - _BITS)
    is_up = (below > half) | ((below == half) & (kept & 1 == 1))
    exponent = unit + (62 - _BITS)
    mantissa = (kept + is_up).double()
    # In two factors: 2^exponent may be below the normal doubles while the product is not.
    half_way = exponent >> 1
    return mantissa * _power(half_way) * _power(exponent - half_way)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent, exactly, of exponents of normal doubles."""
    return ((exponent + 1023) << (_BITS - 1)).view(torch.float64)
