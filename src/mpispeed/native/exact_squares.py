"""Exact sums of squares on a device, over fixed blocks, by integers: independent of the division of a buffer.

The sum of a block is the double of the compiled host loop. A kernel adds these to an integer that is long enough for
all of them, and without a kernel torch does (`native.exact_sum`). No order changes such sums, and one small table is
all that any number of tensors leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpispeed.base import device as devices
from mpispeed.native import exact_sum
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher, for_tensor

TILE, LIMBS = 256, 32  # cuda/include/mpispeed_squares.cuh has the same numbers
_UNIT, _INFINITIES, _NANS = -352, 30, 31
_THREADS, _TILES_OF_BLOCK, _BLOCKS_OF_PROCESSOR = 256, 64, 8

_LANES = 16
_FIRST = (_UNIT - exact_sum.UNIT) // 32  # the first limb of `exact_sum` that a kernel counts

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
    return Started(_by_reference(tensors, block), exact_sum.doubles_of)


@torch.no_grad()
def square_partials_reference(tensors: Sequence[Tensor], *, block: int) -> list[float]:
    """The same in torch: the lists may differ, their exact sums do not."""
    return exact_sum.doubles_of(_by_reference(tensors, block)) if tensors else []


def _by_reference(tensors: Sequence[Tensor], block: int) -> Tensor:
    limbs = torch.zeros(exact_sum.LIMBS, dtype=torch.int64, device=tensors[0].device)
    _add_by_reference(limbs, tensors, block)
    return limbs


@torch.no_grad()
def add_squares(limbs: Tensor, tensors: Sequence[Tensor], *, block: int) -> None:
    """Add the sums of squares of fixed blocks of each tensor to limbs on their device; nothing waits for it.

    Shapes:
        limbs: [exact_sum.LIMBS], int64; below 2^33 each, as `exact_sum.carry` leaves them.
        tensors: flat and contiguous, of any float dtype; fewer than 2^37 elements together.
    """
    launcher = for_tensor(tensors[0]) if tensors else None
    fast = [x for x in tensors if launcher is not None and x.dtype in TAGS and block == TILE]
    if launcher is not None and fast:
        found = _limbs_by_kernel(launcher, fast)
        limbs[_FIRST : _FIRST + _INFINITIES] += found[:_INFINITIES]
        limbs[exact_sum.NUMBERS :] += found[_INFINITIES:]
    _add_by_reference(limbs, [x for x in tensors if launcher is None or x.dtype not in TAGS or block != TILE], block)


@torch.no_grad()
def _add_by_reference(limbs: Tensor, tensors: Sequence[Tensor], block: int) -> None:
    step = max(SPAN // block, 1) * block
    for x in tensors:
        for start in range(0, x.numel(), step):
            exact_sum.add_doubles(limbs, block_sums(x[start : start + step], block))
            exact_sum.carry(limbs)


def partials_of(limbs: Tensor) -> list[float]:
    """Doubles of decreasing size whose exact sum is that of a kernel's limbs; an infinity or a NaN stands alone.

    Waits for the device. Shapes: limbs [LIMBS].
    """
    found: list[int] = limbs.tolist()
    return exact_sum.split(found[:_INFINITIES], _UNIT, found[_INFINITIES], found[_NANS])


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
