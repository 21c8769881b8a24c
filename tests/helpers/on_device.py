"""Models on the stand-in for a device, and what becomes of them there."""

from __future__ import annotations

import torch
from torch import nn


def moved(model: nn.Module, device: torch.device | None) -> nn.Module:
    """`model` on `device`, with the same parameter objects, so that what was tied stays tied."""
    if device is None:
        return model
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
