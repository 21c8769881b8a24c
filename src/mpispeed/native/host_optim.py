"""Adam, Adagrad, Lion and LAMB on host memory in one call, with torch references that give the same bits.

All work is in fp32 (fp64 for fp64 masters), with t = step and g = grad * grad_scale; each stored value is
rounded once to its dtype, to nearest even. L2 decay adds weight_decay * p to g; decoupled decay takes
lr * weight_decay * p from p before the step:

    Adam     m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
             p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    Adagrad  s = s + g^2;  p = p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)
    Lion     p = p - lr * sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g
    LAMB     m, v as Adam;  q = m / (sqrt(v) + eps) + weight_decay * p
             p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * r * q,  r = |p| / |q| between its limits

The master and the states are fp32, both of one 16-bit dtype, or a 16-bit master with fp32 states; gradients are
fp32, bf16 or fp16. `out` (bf16 or fp16) receives the new master, rounded; it may be the memory of `grad`.
Compiled code runs for these on the host, the reference for fp64. Bits do not depend on `threads`, on the vector width,
nor, except for LAMB, on the division of tensors into ranges. For all functions:

Shapes:
    All tensors are contiguous, on the host and of equal length.

Raises:
    ValueError: lengths, layouts, overlaps, betas, step or threads do not fit.
    TypeError: a tensor is not of a floating dtype, or those of master and state do not go together.

Sources: Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR 2019; Duchi et al., JMLR 2011; Chen et al.,
NeurIPS 2023 (Lion); You et al., ICLR 2020 (LAMB).
"""

from __future__ import annotations

from torch import Tensor

from mpispeed.native.coefficients import Terms, adagrad_terms, adam_terms, lamb_terms, lion_terms
from mpispeed.native.multi_tensor_host import HostTable, Row
from mpispeed.native.reference_updates import run_reference


def _run(rule: str, row: Row, terms: Terms, threads: int) -> float:
    ratios = HostTable(rule, [row]).run([terms], threads=threads)
    return ratios[0] if ratios else 1.0


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """Update master and both moments in place, in one pass over memory."""
    terms = adam_terms(
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
    )
    _run("adam", Row(master, (exp_avg, exp_avg_sq), grad, out), terms, threads)


def adam_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """The same update as `adam` in torch, for every floating dtype and device; `threads` is not used."""
    del threads
    terms = adam_terms(
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
    )
    run_reference("adam", master, (exp_avg, exp_avg_sq), grad, out, terms)


def adagrad(
    master: Tensor,
    square_sum: Tensor,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    step: int,
    lr: float,
    eps: float,
    weight_decay: float,
    lr_decay: float = 0.0,
    decoupled: bool = False,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """Update master and the sum of squared gradients in place, in one pass over memory."""
    terms = adagrad_terms(
        step=step,
        lr=lr,
        eps=eps,
        weight_decay=weight_decay,
        lr_decay=lr_decay,
        decoupled=decoupled,
        grad_scale=grad_scale,
    )
    _run("adagrad", Row(master, (square_sum,), grad, out), terms, threads)


def lion(
    master: Tensor,
    exp_avg: Tensor,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> None:
    """Update master and momentum in place, in one pass over memory."""
    terms = lion_terms(lr=lr, betas=betas, weight_decay=weight_decay, decoupled=decoupled, grad_scale=grad_scale)
    _run("lion", Row(master, (exp_avg,), grad, out), terms, threads)


def lamb(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    out: Tensor | None = None,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    is_eps_inside: bool = False,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    grad_scale: float = 1.0,
    threads: int = 1,
) -> float:
    """Update one full tensor and both its moments in place, in two passes; returns the trust ratio r.

    The norms are sums of fp64 over fixed blocks in a fixed order. r is 1 where a norm is 0.
    """
    terms = lamb_terms(
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
        is_eps_inside=is_eps_inside,
        min_coeff=min_coeff,
        max_coeff=max_coeff,
        grad_scale=grad_scale,
    )
    return _run("lamb", Row(master, (exp_avg, exp_avg_sq), grad, out), terms, threads)
