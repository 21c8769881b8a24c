"""Verbs that move data, split into messages of bounded size; packed through scratch to send columns of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from mpispeed.mesh.collectives import checks

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.transport import Group


def pieces(x: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Views of `x` of at most `limit_bytes` each; at least one, so that empty tensors still meet."""
    step = max(1, limit_bytes // x.itemsize)
    for start in range(0, max(1, x.numel()), step):
        yield x[start : start + step]


def all_gather(group: Group, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order."""
    if out.nbytes <= group.chunk_bytes:
        group.allgather(out, shard)
        return
    cut, window = shard.numel(), group.window_elements(out.dtype)
    columns = out.view(group.size, cut)
    for start in range(0, cut, window):
        piece = shard[start : start + window]
        packed = group.scratch("pack", piece.numel() * group.size, out.dtype)
        group.allgather(packed, piece)
        columns[:, start : start + window].copy_(packed.view(group.size, -1))


def all_to_all(group: Group, out: torch.Tensor, x: torch.Tensor) -> None:
    """Equal parts."""
    if out.nbytes <= group.chunk_bytes:
        group.alltoall(out, x)
        return
    size, window = group.size, group.window_elements(x.dtype)
    sources, targets = x.view(size, -1), out.view(size, -1)
    for start in range(0, sources.shape[1], window):
        part = sources[:, start : start + window]
        packed = group.scratch("pack", part.numel(), x.dtype)
        packed.view(part.shape).copy_(part)
        received = group.scratch("recv", part.numel(), x.dtype)
        group.alltoall(received, packed)
        targets[:, start : start + window].copy_(received.view(part.shape))


def exchange(
    group: Group, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int], counts: Sequence[int]
) -> None:
    """Parts of given sizes; both ends of a pair know its count, so they split it alike without agreement."""
    parts = [x[end - n : end] for n, end in zip(counts, accumulate(counts), strict=True)]
    places = [out[end - n : end] for n, end in zip(out_counts, accumulate(out_counts), strict=True)]
    places[group.rank].copy_(parts[group.rank])
    order = [(group.rank + step) % group.size for step in range(1, group.size)]
    limit = group.chunk_bytes
    sends = [(piece, j) for j in order if counts[j] for piece in pieces(parts[j], limit)]
    recvs = [(piece, j) for j in reversed(order) if out_counts[j] for piece in pieces(places[j], limit)]
    group.exchange_pairs(sends, recvs)


def reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """By the library; shards too large for one message go through packed windows."""
    if full.nbytes <= group.chunk_bytes:
        if not checks.overlaps(full, shard):
            group.library_reduce_scatter(shard, full, op)
            return
        apart = group.scratch("recv", shard.numel(), shard.dtype)
        group.library_reduce_scatter(apart, full, op)
        shard.copy_(apart)
        return
    cut, window = shard.numel(), group.window_elements(full.dtype)
    columns = full.view(group.size, cut)
    for start in range(0, cut, window):
        part = columns[:, start : start + window]
        packed = group.scratch("pack", part.numel(), full.dtype)
        packed.view(part.shape).copy_(part)
        group.library_reduce_scatter(shard[start : start + window], packed, op)
