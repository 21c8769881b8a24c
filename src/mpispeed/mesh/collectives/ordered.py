"""Reductions in rank order over any transport: equal shards are exchanged all-to-all, each rank sums one.

Every element is summed by the same tree over ranks at any position, so neither the windows used here nor the caller's
shards change a bit. Scratch is bounded by the window, and user buffers are never padded: only the last, short window is
copied into padded scratch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.mesh.collectives.reductions import combine

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.transport import Group

SMALL_BYTES = 32 << 10
"""Below this many gathered bytes one all-gather and a local sum beat two collectives."""


def all_reduce(group: Group, x: torch.Tensor, op: str, scale: float) -> None:
    """Reduce `x` in place.

    Collective over: `group`.
    """
    count, size = x.numel(), group.size
    if size == 1:
        if scale != 1.0:
            combine(x, [x], op, scale=scale, threads=group.threads)
        return
    if count * size * x.itemsize <= SMALL_BYTES:
        everyone = group.scratch("recv", count * size, x.dtype)
        group.allgather(everyone, x)
        combine(x, everyone.view(size, count).unbind(), op, scale=scale, threads=group.threads)
        return
    window = group.window_elements(x.dtype)
    for start in range(0, count, window * size):
        piece = x[start : start + window * size]
        cut = -(-piece.numel() // size)
        padded = piece
        if cut * size != piece.numel():
            padded = group.scratch("pad", cut * size, x.dtype)
            padded[: piece.numel()].copy_(piece)
            padded[piece.numel() :].zero_()
        parts = group.scratch("recv", cut * size, x.dtype)
        group.alltoall(parts, padded)
        own = padded[group.rank * cut : (group.rank + 1) * cut]
        combine(own, parts.view(size, cut).unbind(), op, scale=scale, threads=group.threads)
        group.allgather(padded, own)
        if padded is not piece:
            piece.copy_(padded[: piece.numel()])


def reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Reduce `full` and leave this rank's shard in `shard`, which may be its own slice of `full`.

    Collective over: `group`.
    """
    cut, size = shard.numel(), group.size
    if size == 1:
        combine(shard, [full], op, scale=scale, threads=group.threads)
        return
    columns = full.view(size, cut)
    window = group.window_elements(full.dtype)
    for start in range(0, cut, window):
        width = min(window, cut - start)
        packed = full
        if width != cut:
            packed = group.scratch("pack", width * size, full.dtype)
            packed.view(size, width).copy_(columns[:, start : start + width])
        parts = group.scratch("recv", width * size, full.dtype)
        group.alltoall(parts, packed)
        target = shard[start : start + width]
        combine(target, parts.view(size, width).unbind(), op, scale=scale, threads=group.threads)
