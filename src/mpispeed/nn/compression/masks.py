"""Masks of pruning: which weights, rows, heads or channels stay, by scores.

Scores of the method l1 are sums of magnitudes of the weights at the time when pruning begins; those of topk are
parameters which learn: gradients of the mask are copied to them (Sanh, Wolf and Rush, "Movement Pruning", arXiv
2005.07683).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mpispeed.nn.compression.quantizers import copied_gradient, noise_of

if TYPE_CHECKING:
    from mpispeed.nn.compression.slices import Slices

Kind = Literal["sparse", "row", "head", "channel"]


def kept_count(count: int, ratio: float) -> int:
    """How many of `count` a ratio keeps: rounded up, by the ratio's decimal digits, at least one."""
    return max(1, math.ceil(Fraction(repr(ratio)) * count))


def top_k_mask(scores: Tensor, ratio: float) -> Tensor:
    """1 for the largest scores, the first of equal ones, 0 for others; the gradient is copied to the scores.

    Args:
        scores: floats of any shape.
        ratio: part that is kept.
    """
    with torch.no_grad():
        flat = scores.detach().reshape(-1)
        keep = kept_count(flat.numel(), ratio)
        threshold = flat.float().kthvalue(flat.numel() - keep + 1).values
        mask = flat.float() > threshold
        equal = (flat.float() == threshold).nonzero().view(-1)
        mask[equal[: keep - int(mask.sum())]] = True
        mask = mask.to(scores.dtype).view(scores.shape)
    return copied_gradient(scores, mask)


def mask_shape(kind: Kind, weight: torch.Size | tuple[int, ...], out_dim: int, num_heads: int = 0) -> tuple[int, ...]:
    """The shape of the scores and the mask of a kind: that of the weight, [out, 1], [1, heads] or [out, 1, 1, 1]."""
    if kind == "sparse":
        return tuple(weight)
    if kind == "row":
        return (weight[out_dim], 1)
    return (1, num_heads) if kind == "head" else (weight[out_dim], *(1 for _ in weight[1:]))


def l1_scores(kind: Kind, weight: Tensor, out_dim: int, num_heads: int = 0) -> Tensor:
    """Sums of magnitudes, in fp32, in the shape of the mask."""
    magnitudes = weight.detach().float().abs()
    shape = mask_shape(kind, weight.shape, out_dim, num_heads)
    if kind == "sparse":
        return magnitudes
    if kind == "head":
        columns = magnitudes.sum(out_dim)
        return columns.view(num_heads, -1).sum(1).view(shape)
    return magnitudes.sum([dim for dim in range(magnitudes.dim()) if dim != out_dim]).view(shape)


def initial_scores(shape: tuple[int, ...], key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scores before training: uniform, as Kaiming's rule for leaky ReLUs of slope 5 ** 0.5 has it."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return (noise_of(torch.Size(shape), key, device) * (2 * bound)).to(dtype)


def spread(kind: Kind, mask: Tensor, weight: Tensor, out_dim: int, slices: Slices | None = None) -> Tensor:
    """A mask in a shape that multiplies the weight.

    Collective over: the slices, if there are any, in backward.
    """
    if kind == "sparse":
        return mask
    dim, numbers = 1 - out_dim if kind == "head" else out_dim, mask.view(-1)
    if kind == "head":
        numbers = columns_of(mask, (weight.shape if slices is None else slices.cut.shape)[dim])
    if slices is not None:
        numbers = slices.along(numbers, dim)
    return numbers.view([-1 if each == dim else 1 for each in range(weight.dim())])


def columns_of(mask: Tensor, width: int) -> Tensor:
    """The number of each of `width` columns, from a mask of heads that have as many each."""
    return mask.view(-1, 1).expand(-1, width // mask.numel()).reshape(-1)
