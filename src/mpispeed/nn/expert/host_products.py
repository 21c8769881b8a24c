"""Rows times the weights of their experts on the host, with results written to their place.

The bits are those of a loop of `torch.nn.functional.linear`, whose outputs and gradients of weights would be copied
once more when they are joined: about a tenth of the time of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def serves(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """True on the host, where no autocast is to convert anything."""
    is_plain = rows.device.type == "cpu" and rows.dtype == weights.dtype
    return is_plain and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()


def host_products(
    rows: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Each expert's rows times its weights.

    Shapes: rows [sum of counts, in], weights [experts, out, in], bias [experts, out]; the result [sum of counts, out].
    """
    out: torch.Tensor = _Products.apply(rows, weights, bias, list(counts))
    return out


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, counts: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts = counts
        out = rows.new_empty((rows.shape[0], weights.shape[1]))
        parts = zip(rows.split(counts), weights.unbind(0), out.split(counts), strict=True)
        for number, (part, weight, place) in enumerate(parts):
            if bias is None:
                torch.mm(part, weight.t(), out=place)
            else:
                torch.addmm(bias[number], part, weight.t(), out=place)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights, needs_bias, _ = ctx.needs_input_grad
        grads, parts = grad.split(ctx.counts), rows.split(ctx.counts)
        of_bias = torch.stack([each.sum(0) for each in grads]) if needs_bias else None
        if torch.is_grad_enabled():  # gradients of gradients are wanted, which results in their place cannot have
            pairs = zip(grads, weights.unbind(0), strict=True)
            of_rows = torch.cat([each.mm(weight) for each, weight in pairs]) if needs_rows else None
            pairs = zip(grads, parts, strict=True)
            of_weights = torch.stack([each.t().mm(part) for each, part in pairs]) if needs_weights else None
            return of_rows, of_weights, of_bias, None
        of_rows = torch.empty_like(rows) if needs_rows else None
        of_weights = torch.empty_like(weights) if needs_weights else None
        for number, (each, part) in enumerate(zip(grads, parts, strict=True)):
            if of_weights is not None:
                torch.mm(each.t(), part, out=of_weights[number])
        if of_rows is not None:
            for each, weight, place in zip(grads, weights.unbind(0), of_rows.split(ctx.counts), strict=True):
                torch.mm(each, weight, out=place)
        return of_rows, of_weights, of_bias, None
