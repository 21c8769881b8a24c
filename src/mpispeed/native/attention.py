"""Attention with its probabilities written out: two batched matrix products around the fused softmax.

For cases that `torch.nn.functional.scaled_dot_product_attention` has no kernel for, and for dropout repeated from a
seed. Kept for backward: queries, keys, values, the probabilities, and, unless they are recomputed, the probabilities
after dropout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mpispeed.native.cuda import ops, philox
from mpispeed.native.softmax import check_mask, run_dropout, run_softmax, run_softmax_backward

_DIMS = 4


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    ratio: float = 0.0,
    seed: Tensor | None = None,
    training: bool = True,
    keeps_dropped: bool = True,
) -> Tensor:
    """dropout(softmax(scale * q k^T + mask)) v.

    The scale is a factor within the first matrix product, so scores that fit only when scaled do not overflow. Scores
    and probabilities are stored in the dtype of `q`; sums, and everything within the softmax, are in fp32.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: as of `softmax.masked_softmax`.
        scale: 1 / sqrt(width) by default.
        is_causal: a query sees no key after itself; the last query sees all keys.
        ratio: part of the probabilities that is dropped in training.
        seed: of the dropout; drawn if there is none.
        training: False means no dropout.
        keeps_dropped: False computes the probabilities after dropout again in backward, and saves their memory.

    Shapes:
        q: [batch, heads, queries, width].
        k: [batch, heads, keys, width].
        v: [batch, heads, keys, value width].
        result: [batch, heads, queries, value width].

    Raises:
        ValueError: shapes, mask or ratio do not fit.
    """
    fits = q.dim() == k.dim() == v.dim() == _DIMS and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if not fits or q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        msg = f"attention of {shapes}; expected [batch, heads, queries or keys, width] of the same batch and heads"
        raise ValueError(msg)
    check_mask(mask, (*q.shape[:3], k.shape[2]), q.device)
    drops = training and philox.threshold(ratio) > 0
    if drops and seed is None:
        seed = philox.draw_seed(q)
    factor = 1.0 / math.sqrt(max(q.shape[3], 1)) if scale is None else scale
    seed, ratio = (seed, ratio) if drops else (None, 0.0)
    out: Tensor = _attention(q, k, v, mask, seed, factor, is_causal, ratio, keeps_dropped)[0]
    return out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    ratio: float,
    keeps_dropped: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the probabilities, and those after dropout (empty if they are not kept, or nothing is dropped)."""
    scores = _product(_flat(q), _flat(k).transpose(1, 2), scale).view(*q.shape[:3], k.shape[2])
    left, probs = run_softmax(scores, mask, seed, scale=1.0, is_causal=is_causal, ratio=ratio)
    del scores
    context = torch.bmm(_flat(left), _flat(v)).view(*q.shape[:3], v.shape[3])
    if not ratio:
        return context, left, probs
    return context, probs, left if keeps_dropped else q.new_empty(0)


def _run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    probs: Tensor,
    left: Tensor,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    ratio: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not ratio:
        left = probs
    elif left.numel() != probs.numel():
        left = run_dropout(probs, seed, ratio)
    grad_flat = _flat(grad)
    dv = torch.bmm(_flat(left).transpose(1, 2), grad_flat).view(v.shape)
    del left
    dropped = torch.bmm(grad_flat, _flat(v).transpose(1, 2)).view(probs.shape)
    dscores = _flat(run_softmax_backward(dropped, probs, seed, scale=1.0, is_causal=is_causal, ratio=ratio))
    del dropped
    dq = _product(dscores, _flat(k), scale).view(q.shape)
    dk = _product(dscores.transpose(1, 2), _flat(q), scale).view(k.shape)
    return dq, dk, dv


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[2], x.shape[3])


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The product of a and b times `scale`, which is a factor within it."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    ratio: float,
    keeps_dropped: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    probs = q.new_empty(*q.shape[:3], k.shape[2])
    left = torch.empty_like(probs) if ratio and keeps_dropped else q.new_empty(0)
    return q.new_empty(*q.shape[:3], v.shape[3]), probs, left


def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    probs: Tensor,
    left: Tensor,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    ratio: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, _, seed, ctx.scale, ctx.is_causal, ctx.ratio, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output[1:], seed)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    none: tuple[Tensor | None, ...] = (None,) * 9
    if grad is None:
        return none
    *tensors, seed = ctx.saved_tensors
    return *_backward(grad, *tensors, seed, ctx.scale, ctx.is_causal, ctx.ratio), *none[3:]


_backward = ops.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor probs, Tensor left, Tensor? seed, "
    "float scale, bool is_causal, float ratio) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_attention = ops.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, float scale, bool is_causal, float ratio, "
    "bool keeps_dropped) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    autocast=("q", "k", "v"),
)
ops.differentiate(_attention, _save, _differentiate)
