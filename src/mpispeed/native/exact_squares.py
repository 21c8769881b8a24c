"""Exact sums of squares on a device, over fixed blocks, by integers: independent of the division of a buffer.

The sum of a block is the double of the compiled host loop. A kernel adds these to an integer that is long enough for
all of them; without a kernel torch adds up the halves of their mantissas by powers of two. No order changes such sums,
and one small table is copied to the host for any number of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from mpispeed.base import device as devices
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher, for_tensor

TILE, LIMBS = 256, 32  # cuda/include/mpispeed_squares.cuh has the same numbers
_UNIT, _INFINITIES, _NANS = -352, 30, 31
_THREADS, _TILES_OF_BLOCK, _BLOCKS_OF_PROCESSOR = 256, 64, 8

_LANES = 16
_BITS = 53
_HALF = 26
_LEAST_EXPONENT = -1074
"""Doubles are whole multiples of 2 to this power."""

_POWERS = 2200
"""Powers of two that doubles can have, as differences from the least."""

SPAN = 1 << 25
"""Elements that torch works on at a time: temporaries take 8 bytes for each."""


def square_partials(tensors: Sequence[Tensor], *, block: int) -> list[float]:
    """A few doubles whose exact sum is that of the sums of squares of fixed blocks of each tensor.

    Any NaN gives [nan]; any infinity, or a block sum beyond fp64, gives [inf]. Waits for the device at most twice. On
    meta there are none.

    Shapes:
        tensors: flat and contiguous, on one device, of any float dtype.

    Source: the formula of `native.reduce.square_partials`; Kulisch's long accumulator.
    """
    if not tensors or tensors[0].is_meta:
        return []
    launcher = for_tensor(tensors[0])
    fast = [x for x in tensors if launcher is not None and x.dtype in TAGS and block == TILE]
    slow = [x for x in tensors if launcher is None or x.dtype not in TAGS or block != TILE]
    found = [] if launcher is None or not fast else partials_of(_limbs_by_kernel(launcher, fast))
    return found + square_partials_reference(slow, block=block) if slow else found


class Started:
    """Partials on their way from a device to the host."""

    def __init__(self, found: Tensor, read: Callable[[Tensor], list[float]]) -> None:
        self._host = devices.pinned(found.numel(), found.dtype).copy_(found, non_blocking=True)
        self._arrived, self._read = devices.mark(found.device), read

    def partials(self) -> list[float]:
        """As `square_partials`. Waits for them, and for nothing that was queued later."""
        self._arrived.synchronize()
        return self._read(self._host)


def start_square_partials(tensors: Sequence[Tensor], *, block: int) -> Started:
    """`square_partials`; nothing waits until they are asked for.

    Shapes: tensors at least one, flat and contiguous, on one device, of one float dtype.
    """
    launcher = for_tensor(tensors[0])
    if launcher is not None and tensors[0].dtype in TAGS and block == TILE:
        return Started(_limbs_by_kernel(launcher, tensors), partials_of)
    return Started(_table_of(tensors, block), _partials_of_table)


@torch.no_grad()
def square_partials_reference(tensors: Sequence[Tensor], *, block: int) -> list[float]:
    """The same in torch: the lists may differ, their exact sums do not."""
    return _partials_of_table(_table_of(tensors, block)) if tensors else []


@torch.no_grad()
def _table_of(tensors: Sequence[Tensor], block: int) -> Tensor:
    """Sums of upper and of lower halves of mantissas by power, then counts of infinities and of NaN."""
    table = torch.zeros(2 * _POWERS + 2, dtype=torch.int64, device=tensors[0].device)
    step = max(SPAN // block, 1) * block
    for x in tensors:
        for start in range(0, x.numel(), step):
            _add(table, block_sums(x[start : start + step], block))
    return table


def _partials_of_table(table: Tensor) -> list[float]:
    """As `partials_of`."""
    found: list[int] = table.tolist()
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


def partials_of(limbs: Tensor) -> list[float]:
    """Doubles of decreasing size whose exact sum is that of the limbs; an infinity or a NaN stands alone.

    Waits for the device. Shapes: limbs [LIMBS].
    """
    found: list[int] = limbs.tolist()
    if found[_NANS]:
        return [math.nan]
    if found[_INFINITIES]:
        return [math.inf]
    total, values = sum(limb << (32 * i) for i, limb in enumerate(found)), []
    while total:
        shift = max(0, total.bit_length() - _BITS)
        values.append(math.ldexp(total >> shift, shift + _UNIT))
        total &= (1 << shift) - 1
    return values


def _limbs_by_kernel(launcher: Launcher, tensors: Sequence[Tensor]) -> Tensor:
    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=tensors[0].device)
    for x in tensors:
        if x.numel():
            blocks = min(-(-x.numel() // (TILE * _TILES_OF_BLOCK)), _BLOCKS_OF_PROCESSOR * launcher.processors)
            launcher.launch(
                f"exact_squares_{TAGS[x.dtype]}", (blocks, 1, 1), (_THREADS, 1, 1),
                x.data_ptr(), limbs.data_ptr(), x.numel(),
            )  # fmt: skip
    return limbs


def block_sums(x: Tensor, block: int) -> Tensor:
    """Sums of squares of all blocks, in the sixteen lanes of the compiled loop; the end is padded with zeros.

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
