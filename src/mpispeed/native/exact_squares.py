"""Sums of squares on a device that do not depend on how a buffer was cut: exact, by integers.

Sums of fixed blocks are the doubles of the compiled host loop. Each is an integer of 53 bits times a power of two; the
upper and lower halves of these integers are added up by their powers, which no order changes and no sum here rounds.
What is copied to the host is one small table.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

_LANES = 16
_BITS = 53
_HALF = 26
_LEAST_EXPONENT = -1074
"""Doubles are whole multiples of 2 to this power."""

_POWERS = 2200
"""Powers of two that doubles can have, as differences from the least."""

SPAN = 1 << 25
"""Elements that are worked on at a time: temporaries take 8 bytes for each."""


@torch.no_grad()
def square_partials(x: Tensor, *, block: int) -> list[float]:
    """A few doubles whose exact sum is that of the sums of squares of fixed blocks; as `native.reduce` has it.

    Any NaN gives [nan]; any infinity, or a block sum beyond fp64, gives [inf]. Waits for the device once.

    Shapes: x flat and contiguous, of any float dtype.
    """
    table = torch.zeros(2 * _POWERS + 2, dtype=torch.int64, device=x.device)
    step = max(SPAN // block, 1) * block
    for start in range(0, x.numel(), step):
        _add(table, block_sums(x[start : start + step], block))
    found = table.cpu().tolist()
    if found[-1]:
        return [math.nan]
    if found[-2]:
        return [math.inf]
    total = sum(
        (Fraction(number) * Fraction(2) ** (power + _LEAST_EXPONENT - _BITS + shift))
        for half, shift in ((0, _HALF), (_POWERS, 0))
        for power, number in enumerate(found[half : half + _POWERS])
        if number
    )
    return _doubles(Fraction(total))


def block_sums(x: Tensor, block: int) -> Tensor:
    """Sums of squares of all blocks, in the sixteen lanes of the compiled loop; what is missing at the end is zero.

    Shapes: result [ceil(x.numel() / block)], fp64.
    """
    blocks, rows = -(-x.numel() // block), -(-block // _LANES)
    wide = torch.zeros(blocks, rows * _LANES, dtype=torch.float64, device=x.device)
    whole = x.numel() // block
    wide[:whole, :block].copy_(x[: whole * block].view(whole, block))
    if whole < blocks:
        wide[whole, : x.numel() - whole * block].copy_(x[whole * block :])
    parts = wide.view(blocks, rows, _LANES)
    parts.mul_(parts)
    lanes = parts[:, 0]
    for row in range(1, rows):
        lanes = lanes + parts[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _add(table: Tensor, sums: Tensor) -> None:
    """Add doubles to the table: by power the upper halves, then the lower ones, then infinities and NaN."""
    is_finite = torch.isfinite(sums)
    table[-1] += torch.isnan(sums).any()
    table[-2] += torch.isinf(sums).any()
    mantissa, power = torch.frexp(torch.where(is_finite, sums, torch.zeros_like(sums)))
    numbers = (mantissa * 2.0**_BITS).to(torch.int64)
    at = power.to(torch.int64) - _LEAST_EXPONENT
    upper = numbers >> _HALF
    table.index_add_(0, at, upper)
    table.index_add_(0, at + _POWERS, numbers - (upper << _HALF))


def _doubles(value: Fraction) -> list[float]:
    """Doubles with exactly this sum, largest first; [inf] if it is beyond them."""
    found: list[float] = []
    while value:
        try:
            nearest = float(value)
        except OverflowError:
            return [math.inf]
        if not nearest:
            break
        found.append(nearest)
        value -= Fraction(nearest)
    return found
