"""Transformer layers on the fused kernels; on the host the kernels' references compute the same."""

from mpispeed.nn.block.config import TransformerConfig
from mpispeed.nn.block.transformer import TransformerLayer

DeepSpeedTransformerConfig = TransformerConfig
DeepSpeedTransformerLayer = TransformerLayer

__all__ = [
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "TransformerConfig",
    "TransformerLayer",
]
