"""The models of the table of features: a small GPT as layers of a pipeline, and as one module with the same values."""

from __future__ import annotations

import torch
from torch import nn

import mpispeed
from mpispeed.base.rng import seed_torch
from mpispeed.curriculum import truncate
from mpispeed.moe import MoE
from mpispeed.pipe import LayerSpec
from tests.helpers.pipes import gpt, gpt_layers

SHAPE = gpt.Shape(layers=2, heads=2, width=16, block=8)
SEED = 5


class Block(gpt_layers.PipeBlock):  # type: ignore[misc]
    """Counts how often blocks are run; the last run of each had `length` tokens."""

    runs = length = 0

    def __init__(self, shape: gpt.Shape, ep_size: int = 0) -> None:
        super().__init__(shape)
        if ep_size:
            plain = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
            self.mlp = OnlyOutput(MoE(shape.width, self.mlp, num_experts=4, ep_size=ep_size, k=2, **plain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.runs += 1
        self.length = x.shape[1]
        return super().forward(x)  # type: ignore[no-any-return]


class OnlyOutput(nn.Module):
    """A layer of experts without its loss and counts."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


def layers(*, ep_size: int = 0) -> list[LayerSpec]:
    """Of a pipeline; the last block has experts on `ep_size` ranks, unless that is 0."""
    blocks = [LayerSpec(Block, SHAPE, ep_size * (number == SHAPE.layers - 1)) for number in range(SHAPE.layers)]
    ends = LayerSpec(gpt_layers.Bytes, SHAPE), LayerSpec(gpt_layers.Head, SHAPE)
    return [ends[0], *blocks, LayerSpec(nn.LayerNorm, SHAPE.width), ends[1]]


class Whole(nn.Module):
    """The same layers with the same values as one module; takes bytes and the next ones, returns the mean loss."""

    def __init__(
        self, *, seed: int = SEED, recomputes: bool = False, is_sparse: bool = False, ep_size: int = 0
    ) -> None:
        super().__init__()
        made = []
        with torch.random.fork_rng(devices=[]):
            for index, spec in enumerate(layers(ep_size=ep_size)):
                seed_torch(seed + index)
                made.append(spec.build())
        self.embedding, *blocks, self.norm, self.head = made
        self.blocks = nn.ModuleList(blocks)
        self.embedding.sparse, self.recomputes = is_sparse, recomputes

    def forward(self, x: torch.Tensor, y: torch.Tensor, curriculum_seqlen: int | None = None) -> torch.Tensor:
        x, y = (x, y) if curriculum_seqlen is None else truncate((x, y), curriculum_seqlen)
        self.length = x.shape[1]
        x = self.embedding(x)
        for block in self.blocks:
            x = mpispeed.checkpointing.checkpoint(block, x) if self.recomputes else block(x)
        return gpt_layers.cross_entropy(self.head(self.norm(x)), y)  # type: ignore[no-any-return]


class WholeWithExperts(Whole):
    """The same with experts in the last block, for `mpispeed plan`."""

    def __init__(self) -> None:
        super().__init__(ep_size=2)
