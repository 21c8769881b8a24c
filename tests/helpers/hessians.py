"""A small model of residual blocks with its loss, and the Hessians of its blocks, computed densely."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tests.zoo.models import Stack, built

WIDTH, BLOCKS = 6, 2


class Scored(nn.Module):
    """Residual blocks with their mean squared error; `recompute` runs each block."""

    def __init__(self, recompute=None) -> None:
        super().__init__()
        self.stack = built(lambda: Stack(BLOCKS, WIDTH))
        self.recompute = recompute

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stack.first(x)
        for block in self.stack.blocks:
            x = block(x) if self.recompute is None else self.recompute(block, x)
        return nn.functional.mse_loss(self.stack.last(x), y)


class Attending(nn.Module):
    """Attention of one block, by torch's function, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = built(lambda: nn.ModuleList([nn.Linear(8, 24)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.blocks[0](x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(*parts).square().mean()


def batch(samples: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and what the model is to say of them."""
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, 2 * x.flip(1).sin()


def dense(loss: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Hessian of `loss` by the elements of `params`."""
    grads = torch.autograd.grad(loss, params, create_graph=True)
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    rows = [torch.autograd.grad(each, params, retain_graph=True) for each in flat]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def largest(model: Scored, data: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """The eigenvalue of the largest magnitude of each block's Hessian."""
    found = []
    for block in model.stack.blocks:
        values = torch.linalg.eigvalsh(dense(model(*data), list(block.parameters())).double())
        found.append(float(values[values.abs().argmax()]))
    return found


class Attended(nn.Module):
    """A layer that attends over samples, by torch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x[None, None]
        return nn.functional.scaled_dot_product_attention(wide, wide, wide)[0, 0]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad


class Single(nn.Module):
    """A layer whose gradient has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Once.apply(x)
