"""Verbs on flat tensors in host memory: choice of algorithm and order of reduction. `Comm` checks and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.mesh.collectives import chunking, ordered
from mpispeed.mesh.collectives.dtypes import COMPLEX, FLOATS, HALF_FLOATS, SUMMED_HERE, as_reducible
from mpispeed.mesh.collectives.work import Posted

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.transport import Fast, Group, Pairs

FAST_FACTOR = 4
"""How much larger a tensor has to be where the library has a good verb of its own to compete with."""


def all_reduce(group: Group, x: torch.Tensor, op: str, scale: float) -> None:
    """Combine `x` in place. Collective over: `group`."""
    x, op, scale = _normal(group, x, op, scale)
    fast = _shortcut(group, x, op)
    if fast is not None:
        fast.all_reduce(x, scale)
    elif _is_ordered(group, x.dtype, op):
        ordered.all_reduce(group, x, op, scale)
    else:
        for piece in chunking.pieces(x, group.chunk_bytes):
            group.library_all_reduce(piece, op)
        _multiply(x, scale)


def reduce(group: Group, x: torch.Tensor, root: int, op: str) -> None:
    """Combine into `x` of `root`; others keep theirs. Collective over: `group`."""
    x, op, scale = _normal(group, x, op, 1.0)
    is_ordered = _is_ordered(group, x.dtype, op)
    for piece in chunking.pieces(x, group.window_bytes if is_ordered else group.chunk_bytes):
        if is_ordered:
            copy = group.scratch("copy", piece.numel(), piece.dtype)
            copy.copy_(piece)
            ordered.all_reduce(group, copy, op, scale)
            if group.rank == root:
                piece.copy_(copy)
        else:
            group.library_reduce(piece, root, op)
            if group.rank == root:
                _multiply(piece, scale)


def broadcast(group: Group, x: torch.Tensor, root: int) -> None:
    """Copy `x` of `root` to all. Collective over: `group`."""
    for piece in chunking.pieces(x, group.chunk_bytes):
        group.library_broadcast(piece, root)


def all_gather(group: Group, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order; `shard` may be the own slice of `out`. Collective over: `group`."""
    fast = _shortcut(group, out, None)
    if fast is not None:
        fast.all_gather(out, shard)
    else:
        chunking.all_gather(group, out, shard)


def reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Combine `full` and keep this rank's shard; `shard` may be its slice of `full`. Collective over: `group`."""
    shard, _, _ = _normal(group, shard, op, scale)
    full, op, scale = _normal(group, full, op, scale)
    fast = _shortcut(group, full, op)
    if fast is not None:
        fast.reduce_scatter(shard, full, scale)
    elif _is_ordered(group, full.dtype, op):
        ordered.reduce_scatter(group, shard, full, op, scale)
    else:
        chunking.reduce_scatter(group, shard, full, op)
        _multiply(shard, scale)


def all_to_all(
    group: Group, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, counts: Sequence[int] | None
) -> None:
    """Equal parts, or parts of given lengths. Collective over: `group`."""
    if counts is None or out_counts is None:
        chunking.all_to_all(group, out, x)
    else:
        chunking.exchange(group, out, x, out_counts, counts)


def gather(group: Group, out: torch.Tensor, shard: torch.Tensor, root: int) -> None:
    """Equal shards in rank order into `out` of `root`. Collective over: `group`."""
    if group.rank != root:
        group.exchange_pairs([(piece, root) for piece in chunking.pieces(shard, group.chunk_bytes)], [])
        return
    places = out.view(group.size, shard.numel())
    group.exchange_pairs([], _with_others(group, places))
    if places[root].data_ptr() != shard.data_ptr():
        places[root].copy_(shard)


def scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, root: int) -> None:
    """Equal parts of `full` of `root`, one for each rank. Collective over: `group`."""
    if group.rank != root:
        group.exchange_pairs([], [(piece, root) for piece in chunking.pieces(shard, group.chunk_bytes)])
        return
    parts = full.view(group.size, shard.numel())
    group.exchange_pairs(_with_others(group, parts), [])
    if parts[root].data_ptr() != shard.data_ptr():
        shard.copy_(parts[root])


def _with_others(group: Group, rows: torch.Tensor) -> Pairs:
    """The row of each other rank, in pieces. Shapes: rows [size, n]."""
    others = (rank for rank in range(group.size) if rank != group.rank)
    return [(piece, rank) for rank in others for piece in chunking.pieces(rows[rank], group.chunk_bytes)]


def send(group: Group, x: torch.Tensor, dst: int, tag: int) -> None:
    """One message, in pieces."""
    for piece in chunking.pieces(x, group.chunk_bytes):
        group.library_send(piece, dst, tag)


def recv(group: Group, x: torch.Tensor, src: int, tag: int) -> None:
    """One message, in pieces."""
    for piece in chunking.pieces(x, group.chunk_bytes):
        group.library_recv(piece, src, tag)


def post_send(group: Group, x: torch.Tensor, dst: int, tag: int) -> Posted:
    """One message in pieces, not waited for."""
    return Posted([group.post_send(piece, dst, tag) for piece in chunking.pieces(x, group.chunk_bytes)], x)


def post_recv(group: Group, x: torch.Tensor, src: int, tag: int) -> Posted:
    """One message in pieces, not waited for."""
    return Posted([group.post_recv(piece, src, tag) for piece in chunking.pieces(x, group.chunk_bytes)], x)


def _shortcut(group: Group, x: torch.Tensor, op: str | None) -> Fast | None:
    """The path through shared memory if it takes this tensor; `op` is None for verbs without reduction."""
    if group.size == 1 or (op is not None and (op != "sum" or x.dtype not in SUMMED_HERE)):
        return None
    is_ours = op is not None and _is_ordered(group, x.dtype, op)
    return group.fast() if x.nbytes >= group.fast_bytes * (1 if is_ours else FAST_FACTOR) else None


def _is_ordered(group: Group, dtype: torch.dtype, op: str) -> bool:
    """True if the order of reduction is fixed here; integers and extrema give the same bits in any order."""
    if dtype in HALF_FLOATS:
        return True
    rounds = op in ("sum", "prod") and (dtype in FLOATS or dtype in COMPLEX)
    return rounds and (group.reduction == "ordered" or group.size == 1)


def _normal(group: Group, x: torch.Tensor, op: str, scale: float) -> tuple[torch.Tensor, str, float]:
    x, op = as_reducible(x, op)
    return (x, "sum", scale / group.size) if op == "avg" else (x, op, scale)


def _multiply(x: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        x.mul_(scale)
