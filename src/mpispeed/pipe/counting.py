"""Trainable parameters of layers that are not built yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mpispeed.base import rng
from mpispeed.pipe.layers import Layer, LayerSpec, made

FILLING = frozenset({"normal_", "uniform_", "random_", "bernoulli_"})
DRAWING = frozenset({"randn", "rand"})


def count_parameters(layers: Sequence[Layer]) -> list[int]:
    """Trainable parameters of each layer; generators stay as they are.

    Specs are built without memory if possible, else for a moment with it.
    """
    generators = rng.capture()
    try:
        return [_trainable(layer) for layer in layers]
    finally:
        rng.restore(generators)


def _trainable(layer: Layer) -> int:
    source = layer.source
    if isinstance(source, LayerSpec):
        try:
            with torch.device("meta"), _Unfilled():
                source = source.build()
        except Exception:  # a constructor that reads its values cannot run without memory
            source = made(layer)
    if not isinstance(source, nn.Module):
        return 0
    return sum(param.numel() for param in source.parameters() if param.requires_grad)


class _Unfilled(TorchFunctionMode):
    """Mode that skips random values of tensors without memory: torch would import its compiler for them (seconds)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Leave such tensors alone, hand on all else."""
        kwargs = kwargs or {}
        name, target = getattr(func, "__name__", ""), args[0] if args else kwargs.get("tensor")
        if isinstance(target, torch.Tensor) and target.is_meta:
            is_init = getattr(func, "__module__", "") == "torch.nn.init" and name.endswith("_")
            if is_init or name in FILLING:
                return target
        if name in DRAWING and func in (torch.randn, torch.rand):
            return torch.empty(*args, **{key: value for key, value in kwargs.items() if key != "generator"})
        return func(*args, **kwargs)
