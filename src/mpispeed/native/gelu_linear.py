"""The second half of an MLP, a linear map of GELU(x + bias), without keeping the GELU for backward.

The input, the bias and the weight are kept; backward recomputes the GELU, one pass over memory beside two matrix
products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpispeed.native import transformer
from mpispeed.native.cuda import ops


def gelu_linear(x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """`linear(bias_gelu(x, bias), weight)`, the tanh form of GELU; the same bits, with less memory.

    Shapes: x [..., n], bias [n], weight [m, n]; the result is [..., m].

    Raises:
        ValueError: shapes or dtypes do not fit. Within `torch.autocast` bias and weight come in x's dtype.
    """
    ops.check_one_dtype("gelu_linear", x, bias=bias, weight=weight)
    if x.dim() < 1 or bias.shape != x.shape[-1:] or weight.dim() != 2 or weight.shape[1:] != bias.shape:
        shapes = f"x {tuple(x.shape)}, bias {tuple(bias.shape)}, weight {tuple(weight.shape)}"
        msg = f"gelu_linear of {shapes}; expected [..., n], [n] and [m, n]"
        raise ValueError(msg)
    y: Tensor = _gelu_linear(x, bias, weight)
    return y


def _run(x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    return F.linear(_gelu(x, bias), weight)


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    return transformer.bias_gelu(x, bias)


def _run_backward(grad: Tensor, x: Tensor, bias: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = grad.reshape(-1, grad.shape[-1])
    dweight = flat.t() @ _gelu(x, bias).view(-1, x.shape[-1])
    dx, dbias = torch.ops.mpispeed.bias_gelu_backward((flat @ weight).view(x.shape), x, bias, False, True)
    return dx, dbias, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if grad is None else tuple(_backward(grad, *ctx.saved_tensors))


_backward = ops.define(
    "gelu_linear_backward(Tensor grad, Tensor x, Tensor bias, Tensor weight) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    lambda grad, x, bias, weight: (x.new_empty(x.shape), bias.new_empty(bias.shape), weight.new_empty(weight.shape)),
)
_gelu_linear = ops.define(
    "gelu_linear(Tensor x, Tensor bias, Tensor weight) -> Tensor",
    _run,
    lambda x, bias, weight: x.new_empty(*x.shape[:-1], weight.shape[0]),
    autocast=("x",),
    follow=("bias", "weight"),
)
ops.differentiate(_gelu_linear, _save, _differentiate)
