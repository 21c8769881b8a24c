"""Networks with base shapes of the package mup."""

from __future__ import annotations

import mup
import torch
from torch import nn

from tests.zoo.models import WIDTH, built

BASE, DELTA, WIDE = 4, 6, 12


class MuNet(nn.Module):
    """Matrices that grow in one and in both dims, vectors, and a parameter that does not grow."""

    def __init__(self, width: int = WIDE, inner: int | None = None) -> None:
        super().__init__()
        inner = 2 * width if inner is None else inner
        self.first = nn.Linear(WIDTH, width)
        self.up = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(inner, width, bias=False)
        self.last = mup.MuReadout(width, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return nn.functional.mse_loss((self.last(x) * self.scale).float(), y)


def shaped(model: nn.Module) -> nn.Module:
    """Give a `MuNet` its base shapes, in which the two widths have grown to 3 and 5 times."""
    with torch.device("meta"):
        base, delta = MuNet(BASE), MuNet(DELTA)
    return mup.set_base_shapes(model, base, delta=delta)


def net() -> nn.Module:
    """A network with base shapes, always with the same weights; its inner width has grown more than the other."""
    return shaped(built(lambda: MuNet(WIDE, 10 * BASE)))
