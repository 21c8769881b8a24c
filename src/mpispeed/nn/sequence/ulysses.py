"""Heads for tokens: each rank gets all tokens of a share of the heads, and gives its share of the output back.

Neither heads nor tokens need be multiples of the ranks: ranks have one head more or less, or none. A rank gets the
heads of keys and values that its heads of queries see, so heads of which there are fewer than ranks are copied, and
their gradients are summed.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpispeed.base.even_split import share
from mpispeed.mesh.comm import Comm
from mpispeed.nn.sequence.layout import Range


@dataclass(frozen=True, eq=False)
class Trade:
    """Tokens of each rank before, heads of each rank after.

    Attributes:
        comm: the ranks.
        counts: tokens of each rank, in rank order.
        heads: heads of the queries.
        kv_heads: heads of keys and values; they divide `heads`.
    """

    comm: Comm
    counts: tuple[int, ...]
    heads: int
    kv_heads: int

    def queries(self, rank: int) -> Range:
        """Heads of the queries that a rank gets."""
        return share(self.heads, rank, self.comm.size)

    def keys(self, rank: int) -> Range:
        """Heads of keys and values that a rank gets."""
        start, stop = self.queries(rank)
        group = self.heads // self.kv_heads
        return (start // group, -(-stop // group)) if stop > start else (0, 0)

    def repeats(self) -> list[int] | None:
        """For each own head of queries its own head of keys; None: equally many for each, as attention takes them."""
        (start, stop), (first, last) = self.queries(self.comm.rank), self.keys(self.comm.rank)
        group = self.heads // self.kv_heads
        found = [head // group - first for head in range(start, stop)]
        width = len(found) // max(last - first, 1)
        return None if found == [head for head in range(last - first) for _ in range(width)] else found


def to_heads(q: Tensor, k: Tensor, v: Tensor, trade: Trade) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, differentiable; one message to each rank.

    Args:
        q: [B, h, S, d], the tokens of this rank.
        k: [B, h_kv, S, d].
        v: as `k`.
        trade: who has what.

    Returns:
        [B, own h, sum of tokens, d] and twice [B, own h_kv, sum of tokens, d]; tokens in rank order. The heads of keys
        are repeated where queries share them unequally.

    Collective over: the ranks of `trade`; the same in backward.
    """
    if trade.comm.size == 1:
        return q, k, v
    found: tuple[Tensor, Tensor, Tensor] = _ToHeads.apply(q, k, v, trade)
    repeats = trade.repeats()
    if repeats is None:
        return found
    index = torch.tensor(repeats, device=q.device)
    return found[0], found[1].index_select(1, index), found[2].index_select(1, index)


def to_tokens(out: Tensor, trade: Trade) -> Tensor:
    """All heads of this rank's tokens, differentiable; one message to each rank.

    Args:
        out: [B, own h, sum of tokens, d].
        trade: who has what.

    Returns:
        [B, h, S, d].

    Collective over: the ranks of `trade`; the same in backward.
    """
    if trade.comm.size == 1:
        return out
    found: Tensor = _ToTokens.apply(out, trade)
    return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, trade: Trade) -> tuple[Tensor, ...]:
        ctx.trade = trade
        return _gather_tokens((q, k, v), (trade.queries, trade.keys, trade.keys), trade)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trade: Trade = ctx.trade
        dq, dk, dv = _gather_heads(grads, (trade.queries, trade.keys, trade.keys), trade)
        return dq, dk, dv, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, trade: Trade) -> Tensor:
        ctx.trade = trade
        return _gather_heads((out,), (trade.queries,), trade)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather_tokens((grad,), (ctx.trade.queries,), ctx.trade)[0], None


def _gather_tokens(tensors: Sequence[Tensor], heads: Sequence[Any], trade: Trade) -> tuple[Tensor, ...]:
    """From all heads of own tokens to own heads of all tokens. Collective over: the ranks of `trade`."""
    comm, (rows, _, _, width) = trade.comm, tensors[0].shape
    parts = [
        torch.cat([x[:, slice(*of(rank))] for x, of in zip(tensors, heads, strict=True)], 1).reshape(-1)
        for rank in range(comm.size)
    ]
    widths = [stop - start for start, stop in (of(comm.rank) for of in heads)]
    shapes = [(rows, sum(widths), count, width) for count in trade.counts]
    return torch.cat(_exchange(comm, parts, shapes), 2).split(widths, 1)


def _gather_heads(tensors: Sequence[Tensor], heads: Sequence[Any], trade: Trade) -> list[Tensor]:
    """From own heads of all tokens to all heads of own tokens; heads that several ranks had are summed.

    Collective over: the ranks of `trade`.
    """
    comm, (rows, _, _, width) = trade.comm, tensors[0].shape
    count = trade.counts[comm.rank]
    pieces = zip(*(x.split(trade.counts, 2) for x in tensors), strict=True)
    parts = [torch.cat(piece, 1).reshape(-1) for piece in pieces]
    widths = [[stop - start for start, stop in (of(rank) for of in heads)] for rank in range(comm.size)]
    found = _exchange(comm, parts, [(rows, sum(each), count, width) for each in widths])
    by_rank = [block.split(each, 1) for block, each in zip(found, widths, strict=True)]
    return [
        _summed([blocks[place] for blocks in by_rank], [of(rank) for rank in range(comm.size)])
        for place, of in enumerate(heads)
    ]


def _summed(blocks: Sequence[Tensor], ranges: Sequence[Range]) -> Tensor:
    """Heads of all ranks side by side; those that lie in several ranges are summed in rank order, in fp32 or wider."""
    shape, end = blocks[0].shape, max(stop for _, stop in ranges)
    if sum(stop - start for start, stop in ranges) == end:
        return torch.cat(list(blocks), 1)
    dtype = torch.promote_types(blocks[0].dtype, torch.float32)
    total = blocks[0].new_zeros((shape[0], end, *shape[2:]), dtype=dtype)
    for block, (start, stop) in zip(blocks, ranges, strict=True):
        total[:, start:stop] += block
    return total.to(blocks[0].dtype)


def _exchange(comm: Comm, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Blocks of the given shapes from all ranks. Collective over: the group."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    packed = torch.cat(list(parts))
    out = packed.new_empty(sum(counts))
    comm.all_to_all(out, packed, counts, [part.numel() for part in parts])
    return [block.view(shape) for block, shape in zip(out.split(counts), shapes, strict=True)]
