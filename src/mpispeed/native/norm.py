"""Layer norm and RMS norm with their gradients, each in one pass over the rows; on the host torch computes the same.

Sources: Ba, Kiros, Hinton, "Layer Normalization", 2016; Zhang, Sennrich, "Root Mean Square Layer Normalization",
NeurIPS 2019. Statistics and sums are fp32 (fp64 for fp64); every stored value is rounded once. Gradients of weight and
bias are sums in a fixed order: the same bits in every run on the same device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpispeed.native.columns import inner_dtype
from mpispeed.native.cuda import launcher, ops
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.compiled import is_built
from mpispeed.native.cuda.launcher import Launcher
from mpispeed.native.norm_kernels import calls


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Subtract the mean of the last dim, divide by its deviation, multiply by `weight` and add `bias`.

    Shapes: x [..., n], weight and bias [n]; the result is contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit. Within `torch.autocast` weight and bias come in x's dtype.
    """
    if is_built and not torch.compiler.is_compiling():
        at_once: Tensor | None = calls.run(x, None, weight, bias, eps, True)
        if at_once is not None:
            return at_once
    y: Tensor = _normed("layer_norm", x, None, weight, bias, eps, True)
    return y


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`x + residual`, rounded, and its layer norm, in one pass; so are their gradients.

    Shapes: x and residual [..., n], weight and bias [n].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    y, total = _normed("add_layer_norm", x, residual, weight, bias, eps, True)
    return total, y


def layer_norm_beside(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Give x itself and its layer norm, where x also goes around the norm: both gradients are added in one pass.

    Within `torch.compile` it is `x, layer_norm(x, ...)`, and the compiler adds.

    Shapes: x [..., n], weight and bias [n].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check("layer_norm_beside", x, None, weight, bias)
    if torch.compiler.is_compiling():
        return x, layer_norm(x, weight, bias, eps)
    same, y = _Beside.apply(x, weight, bias, eps)
    return same, y


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Divide by the root of the mean square of the last dim, and multiply by `weight`.

    Shapes: x [..., n], weight [n]; the result is contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit. Within `torch.autocast` the weight comes in x's dtype.
    """
    y: Tensor = _normed("rms_norm", x, None, weight, None, eps, False)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`x + residual`, rounded, and its RMS norm, in one pass; so are their gradients.

    Shapes: x and residual [..., n], weight [n].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    y, total = _normed("add_rms_norm", x, residual, weight, None, eps, False)
    return total, y


def _normed(
    name: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    is_centered: bool,
) -> Any:  # fmt: skip
    """y, or y and the sum if there is a residual: by kernels at once where they take the tensors as they are."""
    if is_built and not torch.compiler.is_compiling():
        got = calls.run(x, residual, weight, bias, eps, is_centered)
        if got is not None:
            return got
    check(name, x, residual, weight, bias)
    y, total = _norm(x, residual, weight, bias, eps, is_centered)[:2]
    return y if residual is None else (y, total)


if is_built:

    class _AtOnce(torch.autograd.Function):
        """Kernels without torch's dispatcher between; the passes are compiled."""

        forward = staticmethod(calls.function_forward)
        backward = staticmethod(calls.function_backward)

    calls.refuse = partial(ops.refuse_second_derivative, "a norm")
    calls.apply = ops.apply_of(_AtOnce)


def norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the sum, mean and reciprocal deviation in torch.

    Shapes: mean and deviation [rows]; the sum is empty without a residual, the mean if nothing is subtracted.
    """
    wide = inner_dtype(x.dtype)
    total = x.new_empty(0)
    if residual is not None:
        x = total = (x.to(wide) + residual.to(wide)).to(x.dtype)
    inner = x.to(wide)
    mean = inner.mean(-1, keepdim=True) if is_centered else None
    centered = inner - mean if mean is not None else inner
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    y = centered * rstd
    y = y if weight is None else y * weight.to(wide)
    y = (y if bias is None else y + bias.to(wide)).to(x.dtype)
    return y.contiguous(), total, inner.new_empty(0) if mean is None else mean.reshape(-1), rstd.reshape(-1)


def norm_backward_reference(
    dy: Tensor, add: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias in torch; `add` is added to the first. No mean: RMS norm."""
    wide, cols = inner_dtype(x.dtype), x.shape[-1]
    inner, grad = x.to(wide).reshape(-1, cols), dy.to(wide).reshape(-1, cols)
    normed = (inner if mean is None else inner - mean[:, None]) * rstd[:, None]
    g = grad if weight is None else grad * weight.to(wide)
    dx = g - normed * (g * normed).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    if add is not None:
        dx = dx + add.to(wide).reshape(-1, cols)
    dweight, dbias = (grad * normed).sum(0), grad.sum(0)
    return dx.reshape(x.shape).to(x.dtype), dweight.to(x.dtype), dbias.to(x.dtype)


def check(name: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    """Check the arguments of a norm.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message begins with `name`.
    """
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        msg = f"{name}: x is {x.dtype} of shape {tuple(x.shape)}; expected floating point and a last dim of 1 or more"
        raise ValueError(msg)
    if residual is not None and residual.shape != x.shape:
        msg = f"{name}: x is {tuple(x.shape)} and residual {tuple(residual.shape)}; they have to be of one shape"
        raise ValueError(msg)
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            msg = f"{name}: {what} is {tuple(parameter.shape)}; expected {tuple(x.shape[-1:])}, the last dim of x"
            raise ValueError(msg)
    ops.check_one_dtype(name, x, residual=residual, weight=weight, bias=bias)


# ---- forward ---------------------------------------------------------------------------------------------------------
def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    runs = launcher_for_rows(x)
    if runs is None:
        return norm_reference(x, residual, weight, bias, eps, is_centered)
    x = x.contiguous()
    residual, weight, bias = (t if t is None else t.contiguous() for t in (residual, weight, bias))
    y, total, mean, rstd = _fake(x, residual, weight, bias, eps, is_centered)
    if not x.numel():
        return y, total, mean, rstd
    stored = None if residual is None else total
    calls.launch(runs, y, stored, mean, rstd, x, residual, weight, bias, eps, is_centered)
    return y, total, mean, rstd


def launcher_for_rows(x: Tensor) -> Launcher | None:
    """The launcher of kernels for rows of `x`; None if the reference runs: no kernel, or more rows than blocks."""
    return launcher.for_tensor(x) if x.dtype in TAGS and x.numel() < x.shape[-1] << 31 else None


def _fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    stats = inner_dtype(x.dtype)
    total = x.new_empty(x.shape if residual is not None else (0,))
    mean = x.new_empty(rows if is_centered else 0, dtype=stats)
    return x.new_empty(x.shape), total, mean, x.new_empty(rows, dtype=stats)


# ---- backward --------------------------------------------------------------------------------------------------------
def _run_backward(
    dy: Tensor, add: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    with_weight: bool, with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    runs = launcher_for_rows(x)
    if runs is None:
        dx, dweight, dbias = norm_backward_reference(dy, add, x, weight, mean, rstd)
        return dx.contiguous(), dweight if with_weight else x.new_empty(0), dbias if with_bias else x.new_empty(0)
    dy, x = dy.contiguous(), x.contiguous()
    add, weight = (t if t is None else t.contiguous() for t in (add, weight))
    outs = _fake_backward(dy, add, x, weight, mean, rstd, with_weight, with_bias)
    if not x.numel():
        return outs[0], outs[1].zero_(), outs[2].zero_()
    sums = (outs[1] if with_weight else None, outs[2] if with_bias else None)
    calls.launch_backward(runs, outs[0], *sums, dy, add, x, weight, mean, rstd)
    return outs


def _fake_backward(
    dy: Tensor, add: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    with_weight: bool, with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    cols = x.shape[-1]
    return x.new_empty(x.shape), x.new_empty(cols if with_weight else 0), x.new_empty(cols if with_bias else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, _, is_centered = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x if residual is None else total, weight, mean if is_centered else None, rstd)
    ctx.has_residual = residual is not None


def _grads(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if not ctx.has_residual:
        dtotal = None
    if dy is None:
        return dtotal, dtotal, None, None, None, None
    dx, dweight, dbias = norm_backward(dy, dtotal, x, weight, mean, rstd, needs[2], needs[3])
    first, second = dx if needs[0] else None, dx if ctx.has_residual and needs[1] else None
    return first, second, dweight if needs[2] else None, dbias if needs[3] else None, None, None


class _Beside(torch.autograd.Function):
    """Autograd function, not an operator of torch, because those must not return their inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        weight = None if weight is None else weight.to(x.dtype)
        y, _, mean, rstd = _norm(x, None, weight, bias, eps, True)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        return x, y

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dx, None, None, None
        ops.refuse_second_derivative("layer_norm_beside", ctx, (dx, dy))
        x, weight, mean, rstd = ctx.saved_tensors
        _, with_weight, with_bias, _ = ctx.needs_input_grad
        dx, dweight, dbias = norm_backward(dy, dx, x, weight, mean, rstd, with_weight, with_bias)
        return dx, dweight if with_weight else None, dbias if with_bias else None, None


_norm = ops.define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool is_centered)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    autocast=("x", "residual"),
    follow=("weight", "bias"),
)
norm_backward = ops.define(
    "norm_backward(Tensor dy, Tensor? add, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, bool with_weight,"
    " bool with_bias) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
ops.differentiate(_norm, _save, _grads)
