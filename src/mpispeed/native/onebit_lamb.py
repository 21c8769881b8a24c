"""The update of 1-bit LAMB with a frozen variance, in torch: the same bits for every number of threads.

There is no compiled loop: next to sums it needs the largest of the ratios of two roots, and it runs on full parameters,
whose momenta have just been exchanged.
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from mpispeed.native.flat import REFERENCE_SPAN, divisor
from mpispeed.native.reference_updates import block_squares, root


class FrozenLamb(NamedTuple):
    """Factors of one update of one parameter."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    trust: float  # moving mean of the trust ratio at the end of the warm-up
    last_factor: float
    factor_min: float
    factor_max: float
    factor_threshold: float


@torch.no_grad()
def update_frozen_lamb(
    param: Tensor, moments: tuple[Tensor, Tensor, Tensor], previous: Tensor, out: Tensor | None, factors: FrozenLamb
) -> float:
    """Update `param` from (new momentum, frozen variance, fresh variance); gives the factor of this update.

    The momentum becomes 0 where the frozen variance is 0. The factor is the largest ratio of the roots of the two
    variances, within its limits; the step is lr * trust * factor.

    Shapes: all tensors are flat and of equal length; `previous` is the momentum of the update before, only read.
    """
    top, weights, directions = 0.0, [0.0], [0.0]
    beta1, beta2 = factors.betas
    tensors = (param, *moments, previous)
    work = torch.float64 if param.dtype == torch.float64 else torch.float32
    for begin in range(0, param.numel(), REFERENCE_SPAN):
        p, m, v, fresh, before = (x[begin : begin + REFERENCE_SPAN] for x in tensors)
        m.masked_fill_(v == 0, 0.0)
        news = m.to(work) - before.to(work) * beta1
        grad = news / divisor(1.0 - beta1, news)
        grad.masked_fill_(v == 0, 0.0)
        fresh.copy_(fresh.to(work) * beta2 + grad * (1.0 - beta2) * grad)
        ratio = (root(v.to(work)) + factors.eps) / (root(fresh.to(work)) + factors.eps)
        ratio.masked_fill_(v == 0, 1.0)  # without eps it would be 0 / 0
        top = _larger(top, float(ratio.max()))
        if factors.weight_decay:
            quotient = _quotient(m, v, factors, work)
            weights += block_squares(quotient)
            directions += block_squares(quotient + p.to(work) * factors.weight_decay)
    factor = _limited(top, reduce(operator.add, weights), reduce(operator.add, directions), factors)
    step_size = factors.lr * factors.trust * factor
    for begin in range(0, param.numel(), REFERENCE_SPAN):
        p, m, v, _, _ = (x[begin : begin + REFERENCE_SPAN] for x in tensors)
        direction = _quotient(m, v, factors, work) + p.to(work) * factors.weight_decay
        updated = p.to(work) - direction * step_size
        p.copy_(updated)
        if out is not None:
            out[begin : begin + REFERENCE_SPAN].copy_(updated)
    return factor


def _larger(a: float, b: float) -> float:
    return b if math.isnan(b) else max(a, b) if not math.isnan(a) else a


def _quotient(m: Tensor, v: Tensor, factors: FrozenLamb, work: torch.dtype) -> Tensor:
    return (m.to(work) / (root(v.to(work)) + factors.eps)).masked_fill_(v == 0, 0.0)


def _limited(top: float, moved: float, whole: float, factors: FrozenLamb) -> float:
    """The factor from the largest ratio and the sums of squares without and with decay."""
    if factors.weight_decay and whole > 0.0:
        share = min(1.0, math.sqrt(moved) / math.sqrt(whole))
        top = top * share + (1.0 - share)
    for least, most in (
        (factors.factor_min, factors.factor_max),
        (
            factors.last_factor * (1.0 - factors.factor_threshold),
            factors.last_factor * (1.0 + factors.factor_threshold),
        ),
    ):
        top = most if top > most else least if top < least else top  # NaN stays
    return top
