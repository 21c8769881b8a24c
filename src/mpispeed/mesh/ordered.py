"""Reductions in rank order over any transport: equal cuts travel all-to-all, each rank sums one cut.

Every element is summed by the same tree over ranks wherever it stands, so neither the windows used
here nor the cut of the caller change a bit. Scratch is bounded by the window, and user buffers are
never padded: only the last, short window is copied into padded scratch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.mesh.ops import combine

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

SMALL_BYTES = 32 << 10
"""Below this many gathered bytes one all-gather and a local sum beat two collectives."""


def all_reduce(comm: Comm, x: torch.Tensor, op: str, scale: float) -> None:
    """Reduce `x` in place.

    Collective over: `comm`.
    """
    count, size = x.numel(), comm.size
    if size == 1:
        if scale != 1.0:
            combine(x, [x], op, scale=scale, threads=comm.threads)
        return
    if count * size * x.itemsize <= SMALL_BYTES:
        everyone = comm.scratch("recv", count * size, x.dtype)
        comm.gather_equal(everyone, x)
        combine(x, everyone.view(size, count).unbind(), op, scale=scale, threads=comm.threads)
        return
    window = comm.window_elements(x.dtype)
    for start in range(0, count, window * size):
        piece = x[start : start + window * size]
        cut = -(-piece.numel() // size)
        padded = piece
        if cut * size != piece.numel():
            padded = comm.scratch("pad", cut * size, x.dtype)
            padded[: piece.numel()].copy_(piece)
            padded[piece.numel() :].zero_()
        parts = comm.scratch("recv", cut * size, x.dtype)
        comm.swap_equal(parts, padded)
        own = padded[comm.rank * cut : (comm.rank + 1) * cut]
        combine(own, parts.view(size, cut).unbind(), op, scale=scale, threads=comm.threads)
        comm.gather_equal(padded, own)
        if padded is not piece:
            piece.copy_(padded[: piece.numel()])


def reduce_scatter(comm: Comm, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Reduce `full` and leave this rank's cut in `shard`, which may be its own slice of `full`.

    Collective over: `comm`.
    """
    cut, size = shard.numel(), comm.size
    if size == 1:
        combine(shard, [full], op, scale=scale, threads=comm.threads)
        return
    columns = full.view(size, cut)
    window = comm.window_elements(full.dtype)
    for start in range(0, cut, window):
        width = min(window, cut - start)
        packed = full
        if width != cut:
            packed = comm.scratch("pack", width * size, full.dtype)
            packed.view(size, width).copy_(columns[:, start : start + width])
        parts = comm.scratch("recv", width * size, full.dtype)
        comm.swap_equal(parts, packed)
        target = shard[start : start + width]
        combine(target, parts.view(size, width).unbind(), op, scale=scale, threads=comm.threads)
