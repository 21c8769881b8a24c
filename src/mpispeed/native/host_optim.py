"""Adam and AdamW on host memory in one pass, with a torch twin that gives the same bits.

The update, all in fp32 (fp64 for fp64 masters), with t = step:

    g = grad * grad_scale          (+ weight_decay * p when the decay is not decoupled)
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    p = p - lr * weight_decay * p  (when it is)
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from mpispeed.native import status
from mpispeed.native.flat import KINDS, TWIN_SPAN, any_overlap, check_tensors, check_threads, is_same_memory, overlaps

_DECAY_NONE, _DECAY_DECOUPLED, _DECAY_L2 = 0, 1, 2
_OUT_KINDS = {torch.bfloat16: KINDS[torch.bfloat16], torch.float16: KINDS[torch.float16]}
_GRAD_KINDS = {torch.float32: KINDS[torch.float32], **_OUT_KINDS}


@dataclass(frozen=True, slots=True)
class _Terms:
    """The factors of one update, in double; both paths round them to the working dtype."""

    beta1: float
    beta2: float
    step_size: float
    root_scale: float
    eps: float
    decay: float
    decay_mode: int
    grad_scale: float


def _terms(
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    grad_scale: float,
) -> _Terms:
    beta1, beta2 = float(betas[0]), float(betas[1])
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        msg = f"adam: betas are {(beta1, beta2)}; both must be at least 0 and below 1"
        raise ValueError(msg)
    if step < 1:
        msg = f"adam: step is {step}; it counts updates from 1"
        raise ValueError(msg)
    lr, weight_decay = float(lr), float(weight_decay)
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    mode = _DECAY_NONE if weight_decay == 0.0 else _DECAY_DECOUPLED if decoupled else _DECAY_L2
    return _Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=lr / correction1,
        root_scale=1.0 / math.sqrt(correction2),
        eps=float(eps),
        decay=lr * weight_decay if decoupled else weight_decay,
        decay_mode=mode,
        grad_scale=float(grad_scale),
    )


def _check(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None) -> int:
    tensors = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    if out is not None:
        tensors["out"] = out
    length = check_tensors("adam", tensors)
    for name, x in tensors.items():
        if not x.dtype.is_floating_point:
            msg = f"adam: {name} has dtype {x.dtype}; Adam works on floating-point tensors"
            raise TypeError(msg)
    if any_overlap(tensors.values()):
        _refuse_overlap(tensors)
    return length


def _refuse_overlap(tensors: dict[str, Tensor]) -> None:
    """Name the two that share memory, unless it is only `out` in the place of the gradient."""
    for (name_a, a), (name_b, b) in combinations(tensors.items(), 2):
        if overlaps(a, b) and not ((name_a, name_b) == ("grad", "out") and is_same_memory(a, b)):
            msg = f"adam: {name_a} and {name_b} share memory; give each its own buffer"
            raise ValueError(msg)


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
    """Update master and both moments in place, in one pass over memory.

    Compiled for fp32 masters and moments with fp32, bf16 or fp16 gradients; other floating dtypes
    run in `adam_reference`. `out` (bf16 or fp16) receives the new master, rounded to nearest even;
    it may be the memory of `grad`. The bits do not depend on `threads`, on the vector width, nor on
    where the range starts or was cut.

    Shapes:
        All tensors are contiguous, on the host and of equal length.

    Raises:
        ValueError: lengths, layouts, overlaps, betas, step or threads do not fit.
        TypeError: a tensor is not of a floating dtype.
    """
    length = _check(master, exp_avg, exp_avg_sq, grad, out)
    check_threads("adam", threads)
    terms = _terms(step, lr, betas, eps, weight_decay, decoupled, bias_correction, grad_scale)
    is_fp32 = master.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32
    has_loop = is_fp32 and grad.dtype in _GRAD_KINDS and (out is None or out.dtype in _OUT_KINDS)
    module = status.compiled("cpu_adam") if has_loop else None
    if module is None:
        _run_twin(master, exp_avg, exp_avg_sq, grad, out, terms)
        return
    module.adam(
        master.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        0 if out is None else out.data_ptr(),
        length,
        _GRAD_KINDS[grad.dtype],
        0 if out is None else _OUT_KINDS[out.dtype],
        terms.beta1,
        terms.beta2,
        terms.step_size,
        terms.root_scale,
        terms.eps,
        terms.decay,
        terms.decay_mode,
        terms.grad_scale,
        threads,
    )


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
    """The same update as `adam` in torch, for every floating dtype and device.

    Works in fp64 when the master is fp64, otherwise in fp32, and rounds each state to its own dtype.
    `threads` is accepted for symmetry; torch uses its own.

    Shapes:
        All tensors are contiguous and of equal length.

    Raises:
        ValueError: betas or step are out of range.
    """
    terms = _terms(step, lr, betas, eps, weight_decay, decoupled, bias_correction, grad_scale)
    _run_twin(master, exp_avg, exp_avg_sq, grad, out, terms)


@torch.no_grad()
def _run_twin(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, out: Tensor | None, terms: _Terms
) -> None:
    p, m, v, g = (x.detach().view(-1) for x in (master, exp_avg, exp_avg_sq, grad))
    flat_out = None if out is None else out.detach().view(-1)
    for begin in range(0, master.numel(), TWIN_SPAN):
        cut = slice(begin, begin + TWIN_SPAN)
        updated = _twin_span(p[cut], m[cut], v[cut], g[cut], terms)
        if flat_out is not None:
            flat_out[cut].copy_(updated)


def _twin_span(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, t: _Terms) -> Tensor:
    """One span; every operation rounds once, in the order of the compiled loop (no fused alpha, no addcmul)."""
    work = torch.float64 if master.dtype == torch.float64 else torch.float32
    p = master.to(work)
    g = grad.to(work) * t.grad_scale
    if t.decay_mode == _DECAY_L2:
        g = g + p * t.decay
    m = exp_avg.to(work) * t.beta1 + g * (1.0 - t.beta1)
    v = exp_avg_sq.to(work) * t.beta2 + g * (1.0 - t.beta2) * g
    d = v.double().sqrt().to(work) * t.root_scale + t.eps  # torch's own fp32 root can be one bit off
    if t.decay_mode == _DECAY_DECOUPLED:
        p = p - p * t.decay
    p = p - m / d * t.step_size
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    master.copy_(p)
    return p
