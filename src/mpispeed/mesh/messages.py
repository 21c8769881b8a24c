"""Moving verbs cut into messages of bounded size; packed through scratch where columns of cuts must travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from mpispeed.mesh import checks

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


def pieces(x: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Views of `x` of at most `limit_bytes` each; at least one, so that empty tensors still meet."""
    step = max(1, limit_bytes // x.itemsize)
    for start in range(0, max(1, x.numel()), step):
        yield x[start : start + step]


def all_gather(comm: Comm, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order."""
    if out.nbytes <= comm.chunk_bytes:
        comm.gather_equal(out, shard)
        return
    cut, window = shard.numel(), comm.window_elements(out.dtype)
    columns = out.view(comm.size, cut)
    for start in range(0, cut, window):
        piece = shard[start : start + window]
        packed = comm.scratch("pack", piece.numel() * comm.size, out.dtype)
        comm.gather_equal(packed, piece)
        columns[:, start : start + window].copy_(packed.view(comm.size, -1))


def all_to_all(comm: Comm, out: torch.Tensor, x: torch.Tensor) -> None:
    """Equal parts."""
    if out.nbytes <= comm.chunk_bytes:
        comm.swap_equal(out, x)
        return
    size, window = comm.size, comm.window_elements(x.dtype)
    sources, targets = x.view(size, -1), out.view(size, -1)
    for start in range(0, sources.shape[1], window):
        part = sources[:, start : start + window]
        packed = comm.scratch("pack", part.numel(), x.dtype)
        packed.view(part.shape).copy_(part)
        received = comm.scratch("recv", part.numel(), x.dtype)
        comm.swap_equal(received, packed)
        targets[:, start : start + window].copy_(received.view(part.shape))


def exchange(comm: Comm, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int], counts: Sequence[int]) -> None:
    """Parts of given sizes; both ends of a pair know its count, so each pair is cut without agreement."""
    parts = [x[end - n : end] for n, end in zip(counts, accumulate(counts), strict=True)]
    places = [out[end - n : end] for n, end in zip(out_counts, accumulate(out_counts), strict=True)]
    places[comm.rank].copy_(parts[comm.rank])
    order = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    limit = comm.chunk_bytes
    sends = [(piece, j) for j in order if counts[j] for piece in pieces(parts[j], limit)]
    recvs = [(piece, j) for j in reversed(order) if out_counts[j] for piece in pieces(places[j], limit)]
    comm.exchange_pairs(sends, recvs)


def reduce_scatter(comm: Comm, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """By the library; cuts too large for one message go through packed windows."""
    if full.nbytes <= comm.chunk_bytes:
        if not checks.overlaps(full, shard):
            comm.library_reduce_scatter(shard, full, op)
            return
        apart = comm.scratch("recv", shard.numel(), shard.dtype)
        comm.library_reduce_scatter(apart, full, op)
        shard.copy_(apart)
        return
    cut, window = shard.numel(), comm.window_elements(full.dtype)
    columns = full.view(comm.size, cut)
    for start in range(0, cut, window):
        part = columns[:, start : start + window]
        packed = comm.scratch("pack", part.numel(), full.dtype)
        packed.view(part.shape).copy_(part)
        comm.library_reduce_scatter(shard[start : start + window], packed, op)
