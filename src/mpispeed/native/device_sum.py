"""Buffers of a device combined in the tree of `native.reduce`, with its bits; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpispeed.native.reduce import HALF_DTYPES, PAIRWISE


@torch.no_grad()
def combine(out: Tensor, parts: Sequence[Tensor], op: str, scale: float = 1.0) -> None:
    """Combine `parts` in list order by neighbouring pairs, and round once into `out`.

    `op` is "sum" (times `scale`), "prod", "min", "max" or, of integers, bitwise. 16-bit floats are worked on in fp32.
    `out` may be one of the parts, and fp32 where they have 16 bits.

    Shapes:
        All tensors are flat and of equal length, on one device.
    """
    combine_reference(out, parts, op, scale)


@torch.no_grad()
def combine_reference(out: Tensor, parts: Sequence[Tensor], op: str, scale: float = 1.0) -> None:
    """The same in torch, for any dtype that torch computes with and any number of parts."""
    join = PAIRWISE[op]
    level = [x.float() if x.dtype in HALF_DTYPES else x for x in parts]
    while len(level) > 1:
        odd = level[len(level) - len(level) % 2 :]
        level = [join(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)] + odd
    out.copy_(level[0] if scale == 1.0 else level[0] * scale)
