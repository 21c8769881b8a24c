"""The models of the table of features: a small GPT as layers of a pipeline, and as one module with the same values."""

from __future__ import annotations

import torch
from torch import nn

import mpispeed
from mpispeed import sequence
from mpispeed.base.rng import seed_torch
from mpispeed.curriculum import truncate
from mpispeed.moe import MoE
from mpispeed.nn.sequence import running
from mpispeed.nn.sparse import SparseSelfAttention
from mpispeed.pipe import LayerSpec
from tests.helpers.pipes import gpt, gpt_layers

SHAPE = gpt.Shape(layers=2, heads=2, width=16, block=8)
SEED = 5
BYTES = 256


class Attention(nn.Module):
    """The example's, with its weights: to the whole sequence where ranks share it, and to blocks of it if told."""

    def __init__(self, plain: gpt.Attention, has_blocks: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.qkv, self.out = plain.heads, plain.dropout, plain.qkv, plain.out
        self.blocks = SparseSelfAttention(max_seq_length=SHAPE.block) if has_blocks else None

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        if self.blocks is None and running.current() is None:
            return gpt.Attention.forward(self, x, rotation)  # type: ignore[no-any-return]
        found = self.qkv(x)
        q, k, v = found.view(*found.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        own = rotation[:, sequence.positions(found)]
        q, k = gpt._rotate(q, own), gpt._rotate(k, own)
        y = sequence.attention(q, k, v, causal=True) if self.blocks is None else self.blocks(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(gpt_layers.PipeBlock):  # type: ignore[misc]
    """Counts how often blocks are run; the last run of each had `length` tokens, and products in `ran_in`."""

    runs = length = 0
    ran_in = torch.float32

    def __init__(self, shape: gpt.Shape, ep_size: int = 0, has_blocks: bool = False) -> None:
        super().__init__(shape)
        self.attention = Attention(self.attention, has_blocks)
        if ep_size:
            plain = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
            self.mlp = OnlyOutput(MoE(shape.width, self.mlp, num_experts=4, ep_size=ep_size, k=2, **plain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.runs += 1
        self.length = x.shape[1]
        is_cast = torch.is_autocast_enabled("cpu")
        Block.ran_in = torch.get_autocast_dtype("cpu") if is_cast else self.attention.qkv.weight.dtype
        return super().forward(x)  # type: ignore[no-any-return]


class OnlyOutput(nn.Module):
    """A layer of experts without its loss and counts."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


def layers(*, ep_size: int = 0, has_blocks: bool = False) -> list[LayerSpec]:
    """Of a pipeline; the last block has experts on `ep_size` ranks, unless that is 0; `has_blocks`: of attention."""
    experts = [0] * (SHAPE.layers - 1) + [ep_size]
    blocks = [LayerSpec(Block, SHAPE, size, has_blocks) for size in experts]
    ends = LayerSpec(gpt_layers.Bytes, SHAPE), LayerSpec(gpt_layers.Head, SHAPE)
    return [ends[0], *blocks, LayerSpec(nn.LayerNorm, SHAPE.width), ends[1]]


class Whole(nn.Module):
    """The same layers with the same values as one module; takes bytes and the next ones, returns the mean loss."""

    def __init__(
        self,
        *,
        seed: int = SEED,
        recomputes: bool = False,
        is_sparse: bool = False,
        ep_size: int = 0,
        has_blocks: bool = False,
    ) -> None:
        super().__init__()
        made = []
        with torch.random.fork_rng(devices=[]):
            for index, spec in enumerate(layers(ep_size=ep_size, has_blocks=has_blocks)):
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


def widen(model: nn.Module) -> nn.Module:
    """Say that the widths of a model have grown to twice those of a base model, as mup.set_base_shapes does."""
    import mup

    for param in model.parameters():
        shape = tuple(getattr(param, "ds_shape", param.shape))
        fixed = {BYTES} | ({shape[0]} if len(shape) == 3 else set())  # the bytes of a text, and the experts of a stack
        param.infshape = mup.InfShape([mup.InfDim(None if size in fixed else size // 2, size) for size in shape])
    return model


class WholeWithExperts(Whole):
    """The same with experts in the last block, for `mpispeed plan`."""

    def __init__(self) -> None:
        super().__init__(ep_size=2)


class WholeWithBlocks(Whole):
    """The same with attention to blocks, for `mpispeed plan`."""

    def __init__(self) -> None:
        super().__init__(has_blocks=True)


class WholeWithWidths(Whole):
    """The same whose widths have grown, for `mpispeed plan`."""

    def __init__(self) -> None:
        super().__init__()
        widen(self)
