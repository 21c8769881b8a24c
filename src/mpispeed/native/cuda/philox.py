"""Random bits of the kernels, in torch: Philox 4x32-10, bit for bit. Source: Salmon et al., SC 2011.

A dropout is repeated from its seed, so that no mask has to be kept. The seed is drawn from torch's generator of the
host, or of the device in a captured graph; activation checkpointing and `mpispeed.checkpointing`'s trackers put both
back for a second forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HALVES_RUN = 128
"""Elements whose sixteen bits come from sixteen counters together."""

_MASK = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


_is_in_memory = False


@contextmanager
def seeds_in_memory() -> Iterator[None]:
    """Draw seeds on the tensors' device inside of the block, as while a CUDA graph is captured: for tests of both."""
    global _is_in_memory
    before, _is_in_memory = _is_in_memory, True
    try:
        yield
    finally:
        _is_in_memory = before


def are_in_memory(x: Tensor) -> bool:
    """True if a seed for `x` is drawn on its device now, because every replay of a graph has to drop other elements."""
    return _is_in_memory or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def draw_seed(x: Tensor) -> Tensor:
    """A new seed for a dropout of `x`: an int64 scalar.

    In host memory, from torch's default generator of the host; while a CUDA graph is captured on the device, from the
    device's generator.
    """
    is_eager = not torch.compiler.is_compiling()
    device = x.device if is_eager and are_in_memory(x) else "cpu"
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)


def is_place(seed: Tensor | None) -> bool:
    """True if kernels read this seed from memory, not from their arguments."""
    return seed is not None and (seed.is_cuda or _is_in_memory)


def word(seed: Tensor | None, by_place: bool) -> int:
    """What a launch takes for a seed: its address, or the seed itself."""
    if seed is None:
        return 0
    return seed.data_ptr() if by_place else int(seed) % 2**64


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
    return _words_of(seed, counters, 0).reshape(-1)[:count]


def halves(seed: int, stream: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """16 random bits for each of the elements from number `start` on, as int64. Shapes: flat [count].

    A run of 128 elements has sixteen counters: element r of run k takes counter 16 k + r % 16, and of its four words
    the half number r // 16, low halves first. So sixteen lanes of a loop, or of a warp, have a counter each.
    """
    first, last = start // HALVES_RUN, -(-(start + count) // HALVES_RUN)
    counters = torch.arange(first * 16, last * 16, dtype=torch.int64, device=device)
    found = _words_of(seed, counters, stream).view(-1, 16, 4).transpose(1, 2)
    both = torch.stack((found & 0xFFFF, found >> 16), dim=2).reshape(-1)
    return both[start - first * HALVES_RUN :][:count]


def _words_of(seed: int, counters: Tensor, stream: int) -> Tensor:
    """The four words of each counter [n, 4]."""
    zero = torch.zeros_like(counters)
    c = [counters & _MASK, counters >> 32, zero + (stream & _MASK), zero + (stream >> 32 & _MASK)]
    key = [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(_FACTORS[0], c[0]), _product(_FACTORS[1], c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(part + step) & _MASK for part, step in zip(key, _STEPS, strict=True)]
    return torch.stack(c, dim=1)


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 64-bit product, by 16-bit halves: int64 has no unsigned product."""
    low_half = (x & 0xFFFF) * factor
    high_half = (x >> 16) * factor + (low_half >> 16)
    return high_half >> 16, (high_half & 0xFFFF) << 16 | low_half & 0xFFFF
