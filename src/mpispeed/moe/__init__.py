"""Layers of experts, with DeepSpeed's names."""

from mpispeed.moe.layer import MoE

__all__ = ["MoE"]
