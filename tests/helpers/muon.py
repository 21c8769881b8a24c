"""Muon on one process, written down anew: what the engine's has to equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.helpers.system import cannot

HYPER = {"lr": 2e-2, "weight_decay": 0.05, "momentum": 0.9}
"""Params of Muon in the tests, with a decay that shows and a momentum that is not the default."""


def factor(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The orthogonal factor of one matrix as the authors write it: wide, divided by its norm, then the polynomial."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / max(float(wide.norm()), 1e-7)
    for _ in range(steps):
        square = wide @ wide.T
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide.T if x.shape[0] > x.shape[1] else wide


class PlainMuon(torch.optim.Optimizer):
    """Whole matrices with momentum, and Adam of torch for the others."""

    def __init__(
        self,
        model: nn.Module,
        is_matrix: Callable[[str, torch.Tensor], bool],
        flat: Sequence[torch.Tensor] = (),
        **hyper: Any,
    ) -> None:
        """Args: `flat` are weights of convolutions of one dim, which are one matrix each and no stack."""
        params = dict(model.named_parameters())
        self.matrices = [param for name, param in params.items() if is_matrix(name, param)]
        others = [param for name, param in params.items() if not is_matrix(name, param)]
        self.adam = torch.optim.AdamW(others, lr=hyper["lr"], weight_decay=hyper["weight_decay"]) if others else None
        super().__init__([{"params": list(params.values())}], {})
        self.hyper, self.flat = hyper, {id(param) for param in flat}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        del closure
        lr, decay, momentum = (self.hyper[name] for name in ("lr", "weight_decay", "momentum"))
        for param in self.matrices:
            buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
            buffer.mul_(momentum).add_(param.grad, alpha=1 - momentum)
            found = (1 - momentum) * param.grad + momentum * buffer
            items = found if found.dim() == 3 and id(param) not in self.flat else [found.reshape(len(found), -1)]
            made = torch.stack([factor(one) for one in items])
            rows, columns = made.shape[-2:]
            param.mul_(1 - lr * decay)
            param.add_(made.reshape(param.shape), alpha=-lr * math.sqrt(max(1.0, rows / columns)))
        if self.adam is not None:
            self.adam.step()


def is_hidden(name: str, param: torch.Tensor) -> bool:
    """True for matrices of models without tables."""
    return param.dim() >= 2


def needs_muon_of_torch() -> None:
    """Leave the test out where torch has no Muon to compare with: before 2.9."""
    if not hasattr(torch.optim, "Muon"):
        cannot(f"torch.optim.Muon came with torch 2.9, this is torch {torch.__version__}")
