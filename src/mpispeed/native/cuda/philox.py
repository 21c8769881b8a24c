"""Random bits of the kernels, in torch: Philox 4x32-10, bit for bit. Source: Salmon et al., SC 2011.

A dropout is repeated from its seed, so that no mask has to be kept. The seed is drawn from torch's generator of the
host, which activation checkpointing and `mpispeed.checkpointing`'s trackers put back for a second forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError

_MASK = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


def draw_seed() -> Tensor:
    """A new seed: an int64 scalar in host memory, from torch's default generator of the host.

    Raises:
        UsageError: a CUDA graph is being captured, which would drop the same elements in every replay.
    """
    is_eager = torch.cuda.is_initialized() and not torch.compiler.is_compiling()
    if is_eager and torch.cuda.is_current_stream_capturing():
        msg = (
            "a seed of dropout is drawn while a CUDA graph is captured, and every replay would drop the same elements; "
            "capture without dropout (eval mode or ratio 0), or with torch's own"
        )
        raise UsageError(msg)
    return torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")


def threshold(ratio: float) -> int:
    """The dropped part of 2^32: an element stays if its word is not below.

    Raises:
        ValueError: `ratio` is not within [0, 1).
    """
    if not 0.0 <= ratio < 1.0:
        msg = f"a dropout ratio is {ratio!r}; expected a number at least 0 and below 1"
        raise ValueError(msg)
    return min(round(ratio * 2**32), _MASK)


def kept(seed: int, count: int, ratio: float, device: torch.device | str = "cpu") -> Tensor:
    """Mask of the elements that stay, as a flat bool tensor; the reference of `is_kept` in the kernels."""
    return words(seed, count, device) >= threshold(ratio)


def words(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` random 32-bit words of stream 0, as int64. Shapes: flat."""
    counters = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    zero = torch.zeros_like(counters)
    c = [counters & _MASK, counters >> 32, zero, zero]
    key = [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(_FACTORS[0], c[0]), _product(_FACTORS[1], c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(part + step) & _MASK for part, step in zip(key, _STEPS, strict=True)]
    return torch.stack(c, dim=1).reshape(-1)[:count]


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 64-bit product, by 16-bit halves: int64 has no unsigned product."""
    low_half = (x & 0xFFFF) * factor
    high_half = (x >> 16) * factor + (low_half >> 16)
    return high_half >> 16, (high_half & 0xFFFF) << 16 | low_half & 0xFFFF
