"""Layer norm and RMS norm with their gradients, each in one pass over the rows; on the host torch computes the same.

Sources: Ba, Kiros, Hinton, "Layer Normalization", 2016; Zhang, Sennrich, "Root Mean Square Layer Normalization",
NeurIPS 2019. Statistics and sums are fp32 (fp64 for fp64); every stored value is rounded once. Gradients of weight and
bias are sums in a fixed order: the same bits in every run on the same device.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from mpispeed.native.columns import add_up, inner_dtype, is_wide, pointer, tile, vector
from mpispeed.native.cuda import launcher, ops
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher

_KEPT = 4  # vectors of a thread that keeps a row in registers
_GRAD_ROWS = ((8, 2048), (16, 8192))  # columns of a thread, and columns of the longest row for that


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Subtract the mean of the last dim, divide by its deviation, multiply by `weight` and add `bias`.

    Shapes: x [..., n], weight and bias [n]; the result is contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit. Within `torch.autocast` weight and bias come in x's dtype.
    """
    check("layer_norm", x, None, weight, bias)
    y: Tensor = _norm(x, None, weight, bias, eps, True)[0]
    return y


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`x + residual`, rounded, and its layer norm, in one pass; so are their gradients.

    Shapes: x and residual [..., n], weight and bias [n].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check("add_layer_norm", x, residual, weight, bias)
    y, total = _norm(x, residual, weight, bias, eps, True)[:2]
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
    check("rms_norm", x, None, weight, None)
    y: Tensor = _norm(x, None, weight, None, eps, False)[0]
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`x + residual`, rounded, and its RMS norm, in one pass; so are their gradients.

    Shapes: x and residual [..., n], weight [n].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check("add_rms_norm", x, residual, weight, None)
    y, total = _norm(x, residual, weight, None, eps, False)[:2]
    return total, y


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
    way, grid, block, terms = forward_shape(x, eps, residual, weight, bias)
    name = f"{'layer' if is_centered else 'rms'}_norm_{way}_{TAGS[x.dtype]}"
    tensors = (y, total if residual is not None else None, mean, rstd, x, residual, weight, bias)
    runs.launch(name, grid, block, *map(pointer, tensors), terms)
    return y, total, mean, rstd


def launcher_for_rows(x: Tensor) -> Launcher | None:
    """The launcher of kernels for rows of `x`; None if the reference runs: no kernel, or more rows than blocks."""
    return launcher.for_tensor(x) if x.dtype in TAGS and x.numel() < x.shape[-1] << 31 else None


def forward_shape(
    x: Tensor, eps: float, *others: Tensor | None
) -> tuple[str, tuple[int, int, int], tuple[int, int, int], bytes]:
    """Choice between the two kernels of a forward pass, with its grid, its block and its packed terms."""
    cols = x.shape[-1]
    rows = x.numel() // cols
    wide = is_wide(cols, x, *others)
    vectors = cols // vector(x.dtype)
    is_kept = wide and vectors <= 1024 * _KEPT
    threads = _whole_warps(-(-vectors // _KEPT)) if is_kept else _whole_warps(min(1024, vectors if wide else cols))
    down = 256 // threads if is_kept and threads == 32 else 1
    terms = struct.pack("QQfi", rows, cols, eps, wide)
    return "kept" if is_kept else "any", (-(-rows // down), 1, 1), (threads, down, 1), terms


def _whole_warps(threads: int) -> int:
    return (threads + 31) // 32 * 32


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
    if is_wide(x.shape[-1], dy, add, x, weight):
        for width, limit in _GRAD_ROWS:
            if x.shape[-1] <= limit and x.shape[-1] % width == 0:
                _launch_kept(runs, width, outs[0], sums, dy, add, x, weight, mean, rstd)
                return outs
    _launch_any(runs, outs[0], sums, dy, add, x, weight, mean, rstd)
    return outs


def _partial(x: Tensor, rows: int, sums: tuple[Tensor | None, ...]) -> tuple[Tensor, list[int]]:
    """Room for partial sums of both vectors, and where those are written that are wanted (else 0)."""
    rows = 0 if all(out is None for out in sums) else rows
    partial = torch.empty((2, rows, x.shape[-1]), dtype=torch.float32, device=x.device)
    return partial, [0 if out is None else partial[k].data_ptr() for k, out in enumerate(sums)]


def _launch_kept(
    runs: Launcher, width: int, dx: Tensor, sums: tuple[Tensor | None, ...], dy: Tensor, add: Tensor | None, x: Tensor,
    weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
) -> None:  # fmt: skip
    """Everything in one pass: blocks walk over rows and keep sums of their columns."""
    cols = x.shape[-1]
    rows = x.numel() // cols
    across = _whole_warps(cols // width)
    down = max(1, 256 // across)
    # As many blocks as the registers of a multiprocessor hold at once (launch bounds of the kernel).
    at_once = (3 if x.dtype.itemsize == 2 else 2) if width == 8 else 1 if across > 256 else 2
    blocks = min(-(-rows // down), runs.processors * at_once)
    partial, places = _partial(x, blocks, sums)
    inputs = (dy, add, x, weight, mean, rstd)
    name = f"{'rms' if mean is None else 'layer'}_norm_backward_{width}_{TAGS[x.dtype]}"
    terms = struct.pack("QQii", rows, cols, 1, 0)
    shared = across * down * width * 4 if down > 1 else 0
    arguments = (pointer(dx), *places, *map(pointer, inputs), terms)
    runs.launch(name, (blocks, 1, 1), (across, down, 1), *arguments, shared_bytes=shared)
    add_up(runs, partial, sums)


def _launch_any(
    runs: Launcher, dx: Tensor, sums: tuple[Tensor | None, ...], dy: Tensor, add: Tensor | None, x: Tensor,
    weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
) -> None:  # fmt: skip
    cols = x.shape[-1]
    rows = x.numel() // cols
    norm, tag = "rms" if mean is None else "layer", TAGS[x.dtype]
    wide = is_wide(cols, dy, add, x, weight)
    width = vector(x.dtype) if wide else 1
    threads = _whole_warps(min(1024, cols // width))
    terms = struct.pack("QQii", rows, cols, wide, 0)
    inputs = map(pointer, (dy, add, x, weight, mean, rstd))
    runs.launch(f"{norm}_norm_backward_any_{tag}", (rows, 1, 1), (threads, 1, 1), pointer(dx), *inputs, terms)
    if any(out is not None for out in sums):
        grid, block = tile(runs, rows, cols, width)
        partial, places = _partial(x, grid[1], sums)
        inputs = map(pointer, (dy, x, mean, rstd))
        shared = block[0] * block[1] * width * 4
        runs.launch(f"{norm}_norm_columns_{tag}", grid, block, *places, *inputs, terms, shared_bytes=shared)
        add_up(runs, partial, sums)


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
