"""Elementwise passes of a transformer layer: GELU of x + bias, and residual + dropout(x + bias), with gradients.

Sources: Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016 (tanh and exact form); Srivastava et al., "Dropout",
JMLR 2014. Arithmetic is fp32 (fp64 for fp64) and each stored value is rounded once; gradients of a bias are sums in a
fixed order. A mask of dropout is repeated from its seed in backward (`native.cuda.philox`) and takes no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from mpispeed.native.columns import add_up, is_wide, pointer, tile, vector
from mpispeed.native.cuda import launcher, ops, philox
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.cuda.launcher import Launcher
from mpispeed.native.face_kernels import faces
from mpispeed.native.pass_kernels import Rows, drop_backward_pass, drop_pass, drop_terms, gelu_backward_pass, gelu_pass

_TWO_U, _TWO_U3 = 1.5957691216057308, 0.07135481627159628  # 2 sqrt(2 / pi), and times 0.044715

_FORMS = {"tanh": "tanh", "none": "exact"}  # as kernels call them
Form = Literal["tanh", "none"]
"""As in `torch.nn.functional.gelu`."""


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: Form = "tanh") -> Tensor:
    """GELU of `x + bias`; the sum is not rounded in between.

    Shapes: x [..., n], bias [n]; the result is contiguous.

    Raises:
        ValueError: shapes, dtypes or the form do not fit. Within `torch.autocast` the bias comes in x's dtype.
    """
    if faces is not None and approximate in _FORMS and not torch.compiler.is_compiling():
        at_once: Tensor | None = faces.gelu(x, bias, _FORMS[approximate])
        if at_once is not None:
            return at_once
    _check("bias_gelu", x, bias)
    if approximate not in _FORMS:
        msg = f'bias_gelu: approximate is {approximate!r}; expected "tanh" or "none"'
        raise ValueError(msg)
    y: Tensor = _gelu(x, bias, approximate == "none")
    return y


def gelu(x: Tensor, approximate: Form = "tanh") -> Tensor:
    """GELU of `x`, of any shape.

    Raises:
        ValueError: x is not floating point, or the form is unknown.
    """
    return bias_gelu(x, None, approximate)


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor, ratio: float, seed: Tensor | None = None, training: bool = True
) -> Tensor:
    """`residual + dropout(x + bias)`, rounded once. With `ratio` 0, or not in training, nothing is dropped.

    Shapes: x and residual [..., n], bias [n], seed an int64 scalar; the result is contiguous.

    Args:
        x: subject to dropout.
        bias: added to x before.
        residual: added without dropout.
        ratio: part of the elements that become 0; the others are scaled by 1 / (1 - ratio).
        seed: chooses them; None: a new `philox.draw_seed`.
        training: False: as if ratio were 0.

    Raises:
        ValueError: shapes, dtypes or the ratio do not fit.
    """
    if faces is not None and training and not torch.compiler.is_compiling():
        at_once: Tensor | None = faces.drop(x, bias, residual, ratio, seed)
        if at_once is not None:
            return at_once
    _check("bias_dropout_residual", x, bias)
    ops.check_one_dtype("bias_dropout_residual", x, residual=residual)
    if residual.shape != x.shape:
        msg = f"bias_dropout_residual: x is {tuple(x.shape)} and residual {tuple(residual.shape)}; expected one shape"
        raise ValueError(msg)
    philox.threshold(ratio)
    if not training or ratio == 0:
        ratio, seed = 0.0, None
    elif seed is None:
        seed = philox.draw_seed(x)
    y: Tensor = _drop(x, bias, residual, ratio, seed)
    return y


def _check(name: str, x: Tensor, bias: Tensor | None) -> None:
    if not x.is_floating_point():
        msg = f"{name}: x is {x.dtype}; expected floating point"
        raise ValueError(msg)
    if bias is not None and (x.dim() == 0 or bias.shape != x.shape[-1:]):
        msg = f"{name}: bias is {tuple(bias.shape)}; expected {tuple(x.shape[-1:])}, the last dim of x"
        raise ValueError(msg)
    ops.check_one_dtype(name, x, bias=bias)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# ---- references
# -----------------------------------------------------------------------------------------------------------
def gelu_reference(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """GELU of x + bias in torch."""
    z = _wide(x) if bias is None else _wide(x) + _wide(bias)
    share = 0.5 * (1 + torch.erf(z * 0.5**0.5)) if exact else torch.sigmoid(z * (_TWO_U + _TWO_U3 * (z * z)))
    return (z * share).to(x.dtype)


def gelu_backward_reference(dy: Tensor, x: Tensor, bias: Tensor | None, exact: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias in torch; the second is their sum before it is rounded."""
    z = _wide(x) if bias is None else _wide(x) + _wide(bias)
    if exact:
        slope = 0.5 * (1 + torch.erf(z * 0.5**0.5)) + z * torch.exp(-0.5 * z * z) * 0.3989422804014327
    else:
        share = torch.sigmoid(z * (_TWO_U + _TWO_U3 * (z * z)))
        rest = share * (1 - share)
        # Where the share is 0 or 1 nothing is left; the other factor may be infinite there.
        slope = share + torch.where(rest == 0, rest, z * (_TWO_U + 3 * _TWO_U3 * (z * z)) * rest)
    dx = _wide(dy) * slope
    return dx.to(x.dtype), _column_sum(dx, x)


def drop_reference(x: Tensor, bias: Tensor | None, residual: Tensor, ratio: float, seed: Tensor | None) -> Tensor:
    """The sum residual + dropout(x + bias) in torch."""
    z = _wide(x) if bias is None else _wide(x) + _wide(bias)
    return (_wide(residual) + _dropped(z, ratio, seed)).to(x.dtype)


def drop_backward_reference(dy: Tensor, ratio: float, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias in torch; the second is their sum before it is rounded."""
    dx = _dropped(_wide(dy), ratio, seed)
    return dx.to(dy.dtype), _column_sum(dx, dy)


def _dropped(x: Tensor, ratio: float, seed: Tensor | None) -> Tensor:
    if seed is None:
        return x
    kept = philox.kept(int(seed), x.numel(), ratio, x.device).view(x.shape)
    return torch.where(kept, x * (1 / (1 - ratio)), 0.0)


def _column_sum(dx: Tensor, like: Tensor) -> Tensor:
    return dx.reshape(-1, dx.shape[-1]).sum(0).to(like.dtype) if dx.dim() else like.new_empty(0)


# ---- launches --------------------------------------------------------------------------------------------------------
def _cuts(count: int, cols: int | None, *tensors: Tensor | None) -> Iterator[tuple[int, int, int, bool]]:
    """First element, rows, columns of launches for `count` elements, and whether they move 16 bytes at a time.

    `cols` is the length of a bias; without one any division will do, and the last elements are a launch of their own.
    """
    x = next(t for t in tensors if t is not None)
    if cols is not None:
        yield 0, count // cols, cols, is_wide(cols, *tensors)
        return
    fits = is_wide(vector(x.dtype), *tensors)
    step = 32 * vector(x.dtype) if fits else 32
    if count >= step:
        yield 0, count // step, step, fits
    if count % step:
        yield count - count % step, 1, count % step, fits and count % step % vector(x.dtype) == 0


def _at(x: Tensor | None, first: int) -> int:
    return 0 if x is None else pointer(x) + first * x.element_size()


def _are_whole(x: Tensor, *others: Tensor) -> bool:
    """True if rows of all these are whole, aligned 16 bytes."""
    return x.shape[-1] % vector(x.dtype) == 0 and compiled.are_aligned(x, *others)


def _rows(runs: Launcher, x: Tensor) -> Rows:
    cols = x.shape[-1]
    return Rows(runs, x.numel() // cols, cols, x.dtype)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.contiguous() for t in tensors]


def _launch_sums(
    runs: Launcher, kernel: str, dx: Tensor, dbias: Tensor | None, inputs: tuple[Tensor, ...], bias: Tensor | None,
    cols: int | None, terms: Any,
) -> None:  # fmt: skip
    """Launch a kernel of gradients for each part, and add up the partial sums of the bias."""
    out = dx if dx.numel() else None
    for first, rows, width, wide in _cuts(inputs[0].numel(), cols, *inputs, bias, out):
        columns = vector(inputs[0].dtype) if wide else 1
        grid, block = tile(runs, rows, width, columns)
        partial = None
        if dbias is not None:
            partial = torch.empty((1, grid[1], width), dtype=torch.float32, device=inputs[0].device)
        places = [_at(out, first), pointer(partial), *(_at(x, first) for x in inputs)]
        shared = block[0] * block[1] * columns * 4 if dbias is not None else 0
        runs.launch(kernel, grid, block, *places, *terms(first, rows, width, wide), shared_bytes=shared)
        if partial is not None:
            add_up(runs, partial, (dbias,))


# ---- GELU ------------------------------------------------------------------------------------------------------------
def _run_gelu(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    runs = launcher.for_tensor(x) if x.dtype in TAGS else None
    x = x.contiguous()
    if runs is None:
        return gelu_reference(x, bias, exact)
    (bias,) = _contiguous(bias)
    y = torch.empty_like(x)
    form = "exact" if exact else "tanh"
    if bias is not None and x.numel() and _are_whole(x, bias):
        gelu_pass(_rows(runs, x), form)(y, x, bias)
        return y
    name = f"gelu_{form}_{TAGS[x.dtype]}"
    if x.numel():
        for first, rows, cols, wide in _cuts(x.numel(), None if bias is None else bias.numel(), x, bias):
            grid, block = tile(runs, rows, cols, vector(x.dtype) if wide else 1)
            terms = struct.pack("QQii", rows, cols, wide, 0)
            runs.launch(name, grid, block, _at(y, first), _at(x, first), pointer(bias), terms)
    return y


def _run_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, exact: bool, with_bias: bool
) -> tuple[Tensor, Tensor]:
    runs = launcher.for_tensor(x) if x.dtype in TAGS else None
    dy, x = dy.contiguous(), x.contiguous()
    if runs is None:
        dx, dbias = gelu_backward_reference(dy, x, bias, exact)
        return dx, dbias if with_bias else x.new_empty(0)
    (bias,) = _contiguous(bias)
    dx, dbias = _fake_gelu_backward(dy, x, bias, exact, with_bias)
    if not x.numel():
        return dx, dbias.zero_()

    form = "exact" if exact else "tanh"
    if bias is not None and with_bias and _are_whole(x, dy, bias):
        gelu_backward_pass(_rows(runs, x), form).run(dx, dbias, dy, x, bias)
        return dx, dbias

    def terms(_: int, rows: int, cols: int, wide: bool) -> tuple[int, bytes]:
        return pointer(bias), struct.pack("QQii", rows, cols, wide, 0)

    cols = x.shape[-1] if bias is not None or with_bias else None
    name = f"gelu_{form}_grad_{TAGS[x.dtype]}"
    _launch_sums(runs, name, dx, dbias if with_bias else None, (dy, x), bias, cols, terms)
    return dx, dbias


def _fake_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, exact: bool, with_bias: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if with_bias else 0)


def _save_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.exact = inputs
    ctx.save_for_backward(x, bias)


def _gelu_grads(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    x, bias = ctx.saved_tensors
    with_bias = ctx.needs_input_grad[1]
    dx, dbias = _gelu_backward(dy, x, bias, ctx.exact, with_bias)
    return dx, dbias if with_bias else None, None


_gelu = ops.define(
    "bias_gelu(Tensor x, Tensor? bias, bool exact) -> Tensor",
    _run_gelu,
    lambda x, bias, exact: x.new_empty(x.shape),
    autocast=("x",),
    follow=("bias",),
)
_gelu_backward = ops.define(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool exact, bool with_bias) -> (Tensor, Tensor)",
    _run_gelu_backward,
    _fake_gelu_backward,
)
ops.differentiate(_gelu, _save_gelu, _gelu_grads)


# ---- dropout ---------------------------------------------------------------------------------------------------------
def _drop_terms(ratio: float, seed: Tensor | None, first: int, rows: int, cols: int, wide: bool) -> bytes:
    by_place = philox.is_place(seed)
    return drop_terms(rows, cols, first, philox.word(seed, by_place), ratio, by_place, wide)


def _run_drop(x: Tensor, bias: Tensor | None, residual: Tensor, ratio: float, seed: Tensor | None) -> Tensor:
    runs = launcher.for_tensor(x) if x.dtype in TAGS else None
    x, residual = x.contiguous(), residual.contiguous()
    if runs is None:
        return drop_reference(x, bias, residual, ratio, seed)
    (bias,) = _contiguous(bias)
    y = torch.empty_like(x)
    if bias is not None and x.numel() and _are_whole(x, bias, residual):
        by_place = philox.is_place(seed)
        drop_pass(_rows(runs, x), ratio, by_place).seeded(philox.word(seed, by_place), y, x, bias, residual)
        return y
    name = f"bias_dropout_residual_{TAGS[x.dtype]}"
    if x.numel():
        for first, rows, cols, wide in _cuts(x.numel(), None if bias is None else bias.numel(), x, residual, bias):
            grid, block = tile(runs, rows, cols, vector(x.dtype) if wide else 1)
            terms = _drop_terms(ratio, seed, first, rows, cols, wide)
            places = (_at(y, first), _at(x, first), pointer(bias), _at(residual, first))
            runs.launch(name, grid, block, *places, terms)
    return y


def _run_drop_backward(
    dy: Tensor, ratio: float, seed: Tensor | None, with_x: bool, with_bias: bool
) -> tuple[Tensor, Tensor]:
    runs = launcher.for_tensor(dy) if dy.dtype in TAGS else None
    dy = dy.contiguous()
    if runs is None:
        dx, dbias = drop_backward_reference(dy, ratio, seed)
        # Without dropout dx would be dy itself.
        return dx.clone() if with_x else dy.new_empty(0), dbias if with_bias else dy.new_empty(0)
    dx, dbias = _fake_drop_backward(dy, ratio, seed, with_x, with_bias)
    if not dy.numel():
        return dx, dbias.zero_()

    if with_bias and _are_whole(dy):
        out = dx if with_x else None
        launches, by_place = _rows(runs, dy), philox.is_place(seed)
        drop_backward_pass(launches, ratio, by_place).run(out, dbias, dy, seed=philox.word(seed, by_place))
        return dx, dbias

    def terms(first: int, rows: int, cols: int, wide: bool) -> tuple[bytes]:
        return (_drop_terms(ratio, seed, first, rows, cols, wide),)

    cols = dy.shape[-1] if with_bias else None
    name = f"bias_dropout_residual_grad_{TAGS[dy.dtype]}"
    _launch_sums(runs, name, dx, dbias if with_bias else None, (dy,), None, cols, terms)
    return dx, dbias


def _fake_drop_backward(
    dy: Tensor, ratio: float, seed: Tensor | None, with_x: bool, with_bias: bool
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape if with_x else (0,)), dy.new_empty(dy.shape[-1] if with_bias else 0)


def _save_drop(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, _, ctx.ratio, seed = inputs
    ctx.save_for_backward(seed)


def _drop_grads(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    (seed,) = ctx.saved_tensors
    needs = ctx.needs_input_grad
    with_x, with_bias = needs[0] and seed is not None, needs[1]
    dx, dbias = dy, None
    if with_x or with_bias:
        made, dbias = drop_backward(dy, ctx.ratio, seed, with_x, with_bias)
        dx = made if with_x else dy
    return dx if needs[0] else None, dbias if with_bias else None, dy, None, None


_drop = ops.define(
    "bias_dropout_residual(Tensor x, Tensor? bias, Tensor residual, float ratio, Tensor? seed) -> Tensor",
    _run_drop,
    lambda x, bias, residual, ratio, seed: x.new_empty(x.shape),
    autocast=("x", "residual"),
    follow=("bias",),
)
drop_backward = ops.define(
    "bias_dropout_residual_backward(Tensor dy, float ratio, Tensor? seed, bool with_x, bool with_bias)"
    " -> (Tensor, Tensor)",
    _run_drop_backward,
    _fake_drop_backward,
)
ops.differentiate(_drop, _save_drop, _drop_grads)
