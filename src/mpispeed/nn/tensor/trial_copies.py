"""Copies of modules without values, to be tried out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn


class RandomCopies:
    """Gives layers of a model on the meta device; copies have random parameters, alike in all copies."""

    def has(self, tensor: torch.Tensor) -> bool:
        """As `Layers`."""
        return not tensor.is_meta

    def copied(self, module: nn.Module) -> nn.Module:
        """As `Layers`.

        Raises:
            ValueError: a buffer has no values, which nobody can guess.
        """
        for name, buffer in module.named_buffers():
            if buffer.is_meta:
                msg = f"the buffer {name} has no values"
                raise ValueError(msg)
        made = copy.deepcopy(module)
        draw = torch.Generator().manual_seed(1)
        for part in made.modules():
            for name, param in part._parameters.items():
                if param is not None and param.is_meta:
                    values = (
                        torch.randn(param.shape, generator=draw, dtype=torch.float32) / max(param.shape[-1], 1) ** 0.5
                    )
                    part._parameters[name] = nn.Parameter(values.to(param.dtype), requires_grad=param.requires_grad)
        return made

    def replaced(self, old: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        """As `Layers`."""
        return make()
