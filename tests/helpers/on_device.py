"""Models and numbers on the stand-in for a device, and what becomes of them there."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers import verbs


def moved(model: nn.Module, device: torch.device | None) -> nn.Module:
    """`model` on `device`, with the same parameter objects, so that what was tied stays tied."""
    if device is None:
        return model
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def noise(rank, count, dtype):
    """Numbers of a rank, equal in every process, on the host."""
    found = torch.randn(count, generator=torch.Generator().manual_seed(17 + rank), dtype=torch.float64)
    return found > 0 if dtype == torch.bool else (found * 100).to(dtype)


def same(x, expected):
    """True if `x`, wherever it is, has the bits of `expected` on the host."""
    return verbs.same(x.cpu(), expected)
