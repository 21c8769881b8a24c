"""Persistent buffers of a module, such as the running statistics of a BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of the buffers that a state dict holds."""
    names = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in names:
            yield name, buffer
