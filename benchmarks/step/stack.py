"""A model of wide linear layers, for benchmarks in which only the size of states matters."""

from __future__ import annotations

import torch
from torch import nn


class Stack(nn.Module):
    """Linear layers that return their loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean square of the output. Shapes: x [rows, width]."""
        for layer in self.layers:
            x = x + layer(x).tanh() / len(self.layers)
        return x.float().square().mean()
