"""Long sequences, cut over ranks: attention over all of them, losses, and layers in pieces."""

from mpispeed.nn.hf_attention import register_with_transformers
from mpispeed.nn.sequence.attention import attention
from mpispeed.nn.sequence.group import SequenceGroup
from mpispeed.nn.sequence.layout import Layout
from mpispeed.nn.sequence.loss import cross_entropy, mean
from mpispeed.nn.sequence.parts import cut, join, positions
from mpispeed.nn.sequence.running import Running, use
from mpispeed.nn.sequence.tiled import tiled_loss, tiled_mlp

__all__ = [
    "Layout", "Running", "SequenceGroup", "attention", "cross_entropy", "cut", "join", "mean", "positions",
    "register_with_transformers", "tiled_loss", "tiled_mlp", "use",
]  # fmt: skip
