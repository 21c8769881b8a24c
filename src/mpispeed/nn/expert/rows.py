"""Tokens to rows and back, with sums in a fixed order: no addition to memory that others add to.

A row of a token and the token's sum over its k choices are each other's backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpispeed.nn.expert.sorted_plan import SortedPlan


def spread(x: torch.Tensor, plan: SortedPlan) -> torch.Tensor:
    """The rows of a plan. Shapes: x [tokens, hidden], result [rows, hidden]."""
    rows: torch.Tensor = _Spread.apply(x, plan)
    return rows


def combine(rows: torch.Tensor, weights: torch.Tensor, plan: SortedPlan) -> torch.Tensor:
    """For each token the sum of its rows times their weights, in the order of its choices.

    The sum is in fp32 (fp64 for fp64 rows) and rounded once. Shapes: rows [rows, hidden], weights [tokens, k], fp32;
    result [tokens, hidden] in the dtype of the rows.
    """
    combined: torch.Tensor = _Combine.apply(rows, weights, plan)
    return combined


def _sum_of(rows: torch.Tensor, weights: torch.Tensor | None, plan: SortedPlan) -> torch.Tensor:
    tokens, k = plan.places.shape
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros((tokens, rows.shape[1]), dtype=wide, device=rows.device)
    for j in range(k):
        part = _rows_at(rows, plan.places[:, j], plan).to(wide)
        total += part if weights is None else part * weights[:, j, None]
    return total.to(rows.dtype)


def _rows_at(rows: torch.Tensor, places: torch.Tensor, plan: SortedPlan) -> torch.Tensor:
    """Rows at these places, zeros at -1."""
    if plan.is_complete:
        return rows.index_select(0, places)
    found = rows.new_zeros((len(places), rows.shape[1]))
    is_there = places >= 0
    found[is_there] = rows.index_select(0, places[is_there])
    return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: SortedPlan) -> torch.Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_of(grad, None, ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, plan: SortedPlan) -> torch.Tensor:
        ctx.plan = plan
        ctx.save_for_backward(rows, weights)
        return _sum_of(rows, weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        plan: SortedPlan = ctx.plan
        wide = torch.promote_types(rows.dtype, torch.float32)
        grad = grad.to(wide)
        to_rows = to_weights = None
        if ctx.needs_input_grad[0]:
            is_there = plan.places.reshape(-1) >= 0
            of_rows = weights.new_empty(len(rows))
            of_rows[plan.places.reshape(-1)[is_there]] = weights.reshape(-1)[is_there]
            to_rows = (grad.index_select(0, plan.tokens) * of_rows[:, None]).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            parts = [(_rows_at(rows, places, plan).to(wide) * grad).sum(-1) for places in plan.places.unbind(1)]
            to_weights = torch.stack(parts, 1).to(weights.dtype)
        return to_rows, to_weights, None
