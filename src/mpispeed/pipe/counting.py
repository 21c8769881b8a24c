"""Trainable parameters of layers that are not built yet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mpispeed.base import rng
from mpispeed.base.meta import without_memory
from mpispeed.pipe.layers import Layer, LayerSpec, made


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
            source = without_memory(source.build)
        except Exception:  # a constructor that reads its values cannot run without memory
            source = made(layer)
    if not isinstance(source, nn.Module):
        return 0
    return sum(param.numel() for param in source.parameters() if param.requires_grad)
