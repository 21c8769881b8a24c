"""Permute and combine of a mixture of experts, with gradients: tokens to rows that are sorted by expert, and back.

`index[t, j]` is the row of token t's j-th choice, -1 where that was dropped; a row belongs to at most one choice. Bits
and checks are those of `native.permute`, with as many threads as torch uses. Source: DeepSpeed's einsum dispatch, of
which this computes the same sums without the one-hot masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpispeed.native.cuda import ops
from mpispeed.native.permute import combine_rows, dot_rows, spread_rows, working_dtype


def permute(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Every token in the rows of its choices; rows without one are zero.

    The gradient of a token is the sum over its rows in the order of its choices, in fp32 (fp64 for fp64), rounded once.

    Shapes: x [T, H] in fp32, bf16, fp16 or fp64; index [T, k] in int64, -1 to count - 1; the result [count, H].

    Raises:
        ValueError, TypeError, IndexError: shapes, dtypes, devices or places do not fit, or two choices name one row.
    """
    rows: Tensor = _spread(x, index, None, count)
    return rows


def combine(rows: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of every token's rows, each times its weight, in the order of its choices; dropped ones are left out.

    Sums are in fp32 (fp64 for fp64), rounded once, and so is the gradient of a row, its weight times that of the token.
    The gradient of a weight is the product of the row and the token's gradient, summed in fp64 (on devices in fp32).

    Shapes: rows [M, H] in fp32, bf16, fp16 or fp64; index [T, k] in int64, -1 to M - 1; weights [T, k], which are
        converted to fp32 (fp64 for fp64), None for ones; the result [T, H].

    Raises:
        ValueError, TypeError, IndexError: as `permute`; two choices for one row only in backward.
    """
    sums: Tensor = _combine(rows, index, None if weights is None else weights.to(working_dtype(rows.dtype)))
    return sums


# -- operators -------------------------------------------------------------------------------------------------------


def _run_spread(x: Tensor, index: Tensor, weights: Tensor | None, count: int) -> Tensor:
    out = x.new_empty((count, *x.shape[1:]))
    spread_rows(out, x.contiguous(), index.contiguous(), _contiguous(weights), threads=torch.get_num_threads())
    return out


def _run_combine(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    out = rows.new_empty((index.shape[0], *rows.shape[1:]))
    combine_rows(out, rows.contiguous(), index.contiguous(), _contiguous(weights), threads=torch.get_num_threads())
    return out


def _run_dot(x: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    out = x.new_empty(index.shape, dtype=working_dtype(x.dtype))
    dot_rows(out, x.contiguous(), rows.contiguous(), index.contiguous(), threads=torch.get_num_threads())
    return out


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _fake_spread(x: Tensor, _index: Tensor, _weights: Tensor | None, count: int) -> Tensor:
    return x.new_empty((count, *x.shape[1:]))


def _fake_combine(rows: Tensor, index: Tensor, _weights: Tensor | None) -> Tensor:
    return rows.new_empty((index.shape[0], *rows.shape[1:]))


def _fake_dot(x: Tensor, _rows: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape, dtype=working_dtype(x.dtype))


def _save_spread(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _grad_spread(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return None if grad is None else _combine(grad, index, None), None, None, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
    rows, index, weights = inputs
    ctx.count = rows.shape[0]
    ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, index, weights)


def _grad_combine(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, index, weights = ctx.saved_tensors
    if grad is None:
        return None, None, None
    of_rows = _spread(grad, index, weights, ctx.count) if ctx.needs_input_grad[0] else None
    of_weights = _dot(grad, rows, index) if ctx.needs_input_grad[2] else None
    return of_rows, None, of_weights


_spread = ops.define(
    "row_spread(Tensor x, Tensor index, Tensor? weights, SymInt count) -> Tensor", _run_spread, _fake_spread
)
_combine = ops.define("row_combine(Tensor rows, Tensor index, Tensor? weights) -> Tensor", _run_combine, _fake_combine)
_dot = ops.define("row_dot(Tensor x, Tensor rows, Tensor index) -> Tensor", _run_dot, _fake_dot)
ops.differentiate(_spread, _save_spread, _grad_spread)
ops.differentiate(_combine, _save_combine, _grad_combine)
