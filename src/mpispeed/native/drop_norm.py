"""Dropout, residual and norm between two sublayers in one pass: residual + dropout(x + bias) and its layer norm.

The sum has the bits of `transformer.bias_dropout_residual`, the norm is that of `norm.layer_norm`; the sum is read once
less, and backward adds the gradient that goes around the norm within the pass of the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpispeed.native.columns import inner_dtype, vector
from mpispeed.native.cuda import ops, philox
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.face_kernels import faces
from mpispeed.native.norm import check, launcher_for_rows, norm_backward, norm_reference
from mpispeed.native.pass_kernels import Rows, drop_norm_pass
from mpispeed.native.transformer import drop_backward, drop_reference

_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def bias_dropout_layer_norm(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, weight: Tensor | None, bias: Tensor | None, ratio: float,
    eps: float = 1e-5, *, seed: Tensor | None = None, training: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum `residual + dropout(x + x_bias)`, rounded, and its layer norm.

    Shapes: x and residual [..., n]; x_bias, weight and bias [n]; seed an int64 scalar. Results are
    contiguous.

    Args:
        x: subject to dropout.
        x_bias: added to x before.
        residual: added without dropout.
        weight: of the norm.
        bias: of the norm.
        ratio: part of the elements that become 0; the others are scaled by 1 / (1 - ratio).
        eps: added to the variance.
        seed: chooses them; None: a new `philox.draw_seed`.
        training: False: as if ratio were 0.

    Raises:
        ValueError: shapes, dtypes or the ratio do not fit.
    """
    if faces is not None and training and not torch.compiler.is_compiling():
        at_once: tuple[Tensor, Tensor] | None = faces.drop_norm(x, x_bias, residual, weight, bias, ratio, eps, seed)
        if at_once is not None:
            return at_once
    check("bias_dropout_layer_norm", x, residual, weight, bias)
    check("bias_dropout_layer_norm", x, None, x_bias, None)
    philox.threshold(ratio)
    if not training or ratio == 0:
        ratio, seed = 0.0, None
    elif seed is None:
        seed = philox.draw_seed(x)
    y, total = _drop_norm(x, x_bias, residual, weight, bias, ratio, seed, eps)[:2]
    return total, y


def _reference(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, weight: Tensor | None, bias: Tensor | None, ratio: float,
    seed: Tensor | None, eps: float,
) -> _Four:  # fmt: skip
    total = drop_reference(x, x_bias, residual, ratio, seed)
    y, _, mean, rstd = norm_reference(total, None, weight, bias, eps, True)
    return y, total, mean, rstd


def _run(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, weight: Tensor | None, bias: Tensor | None, ratio: float,
    seed: Tensor | None, eps: float,
) -> _Four:  # fmt: skip
    runs = launcher_for_rows(x)
    x, residual = x.contiguous(), residual.contiguous()
    if runs is None:
        return _reference(x, x_bias, residual, weight, bias, ratio, seed, eps)
    x_bias, weight, bias = (t if t is None else t.contiguous() for t in (x_bias, weight, bias))
    y, total, mean, rstd = _fake(x, x_bias, residual, weight, bias, ratio, seed, eps)
    if x.numel():
        cols = x.shape[-1]
        is_whole = cols % vector(x.dtype) == 0 and compiled.are_aligned(x, x_bias, residual, weight, bias)
        rows = Rows(runs, x.numel() // cols, cols, x.dtype)
        by_place = philox.is_place(seed)
        launch = drop_norm_pass(rows, 0.0 if seed is None else ratio, eps, by_place, is_whole=is_whole)
        launch.seeded(philox.word(seed, by_place), y, total, mean, rstd, x, x_bias, residual, weight, bias)
    return y, total, mean, rstd


def _fake(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, weight: Tensor | None, bias: Tensor | None, ratio: float,
    seed: Tensor | None, eps: float,
) -> _Four:  # fmt: skip
    rows = x.numel() // x.shape[-1]
    stats = [x.new_empty(rows, dtype=inner_dtype(x.dtype)) for _ in range(2)]
    return x.new_empty(x.shape), x.new_empty(x.shape), stats[0], stats[1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Four) -> None:
    _, _, _, weight, _, ctx.ratio, seed, _ = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(total, weight, mean, rstd, seed)


def _grads(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    total, weight, mean, rstd, seed = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dweight = dbias = None
    if dy is not None:
        dtotal, dweight, dbias = norm_backward(dy, dtotal, total, weight, mean, rstd, needs[3], needs[4])
    if dtotal is None:
        return (None,) * 8
    with_x, with_bias = needs[0] and seed is not None, needs[1]
    dx, dx_bias = dtotal, None
    if with_x or with_bias:
        made, dx_bias = drop_backward(dtotal, ctx.ratio, seed, with_x, with_bias)
        dx = made if with_x else dtotal
    grads = (dx, dx_bias, dtotal, dweight, dbias)
    return *(grad if need else None for grad, need in zip(grads, needs[:5], strict=True)), None, None, None


_drop_norm = ops.define(
    "drop_norm(Tensor x, Tensor? x_bias, Tensor residual, Tensor? weight, Tensor? bias, float ratio, Tensor? seed,"
    " float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    autocast=("x", "residual"),
    follow=("x_bias", "weight", "bias"),
)
ops.differentiate(_drop_norm, _save, _grads)
