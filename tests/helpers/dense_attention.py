"""Attention by a mask of all pairs in fp64, which what we compute in pieces is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 5e-2, torch.float16: 8e-3}
"""Absolute, of values around 1: some roundings of sums over less than 200 keys, for gradients and outputs."""


def inputs(
    batch: int, heads: int, of_keys: int, lengths: tuple[int, int], width: int, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values and a gradient."""
    generator = torch.Generator().manual_seed(batch + heads + of_keys + sum(lengths))
    shapes = [(heads, lengths[0]), (of_keys, lengths[1]), (of_keys, lengths[1]), (heads, lengths[0])]
    made = [torch.randn(batch, *shape, width, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor, scale: float | None = None) -> list[Tensor]:
    """Output and gradients of q, k, v; rows without a key are zeros."""
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in double[1:])
    scores = double[0] @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias.double()
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
    out = weights @ values
    return [out.detach(), *torch.autograd.grad(out, double, grad.double())]


def bias_of(allowed: Tensor) -> Tensor:
    """0 where allowed, else -inf."""
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)


def compare(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    for ours, dense in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.detach().double(), dense, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
