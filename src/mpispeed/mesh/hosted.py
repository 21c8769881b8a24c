"""The verbs on flat tensors in host memory: choice of algorithm and order of reduction. `Comm` checks and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.mesh import messages, ordered
from mpispeed.mesh.dtypes import COMPLEX, FLOATS, HALF_FLOATS, SUMMED_HERE, as_reducible

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.transport import Fast
    from mpispeed.mesh.work import Poll

FAST_FACTOR = 4
"""How much larger a tensor has to be where the library has a good verb of its own to compete with."""


def all_reduce(comm: Comm, x: torch.Tensor, op: str, scale: float) -> None:
    """Combine `x` in place. Collective over: `comm`."""
    x, op, scale = _normal(comm, x, op, scale)
    fast = _shortcut(comm, x, op)
    if fast is not None:
        fast.all_reduce(x, scale)
    elif _is_ordered(comm, x.dtype, op):
        ordered.all_reduce(comm, x, op, scale)
    else:
        for piece in messages.pieces(x, comm.chunk_bytes):
            comm.library_all_reduce(piece, op)
        _multiply(x, scale)


def reduce(comm: Comm, x: torch.Tensor, root: int, op: str) -> None:
    """Combine into `x` of `root`; others keep theirs. Collective over: `comm`."""
    x, op, scale = _normal(comm, x, op, 1.0)
    is_ordered = _is_ordered(comm, x.dtype, op)
    for piece in messages.pieces(x, comm.window_bytes if is_ordered else comm.chunk_bytes):
        if is_ordered:
            copy = comm.scratch("copy", piece.numel(), piece.dtype)
            copy.copy_(piece)
            ordered.all_reduce(comm, copy, op, scale)
            if comm.rank == root:
                piece.copy_(copy)
        else:
            comm.library_reduce(piece, root, op)
            if comm.rank == root:
                _multiply(piece, scale)


def broadcast(comm: Comm, x: torch.Tensor, root: int) -> None:
    """Copy `x` of `root` to all. Collective over: `comm`."""
    for piece in messages.pieces(x, comm.chunk_bytes):
        comm.library_broadcast(piece, root)


def all_gather(comm: Comm, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order; `shard` may be the own slice of `out`. Collective over: `comm`."""
    fast = _shortcut(comm, out, None)
    if fast is not None:
        fast.all_gather(out, shard)
    else:
        messages.all_gather(comm, out, shard)


def reduce_scatter(comm: Comm, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Combine `full` and keep the own cut; `shard` may be the own slice of it. Collective over: `comm`."""
    shard, _, _ = _normal(comm, shard, op, scale)
    full, op, scale = _normal(comm, full, op, scale)
    fast = _shortcut(comm, full, op)
    if fast is not None:
        fast.reduce_scatter(shard, full, scale)
    elif _is_ordered(comm, full.dtype, op):
        ordered.reduce_scatter(comm, shard, full, op, scale)
    else:
        messages.reduce_scatter(comm, shard, full, op)
        _multiply(shard, scale)


def all_to_all(
    comm: Comm, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, counts: Sequence[int] | None
) -> None:
    """Equal parts, or parts of given lengths. Collective over: `comm`."""
    if counts is None or out_counts is None:
        messages.all_to_all(comm, out, x)
    else:
        messages.exchange(comm, out, x, out_counts, counts)


def send(comm: Comm, x: torch.Tensor, dst: int, tag: int) -> None:
    """One message, in pieces."""
    for piece in messages.pieces(x, comm.chunk_bytes):
        comm.library_send(piece, dst, tag)


def recv(comm: Comm, x: torch.Tensor, src: int, tag: int) -> None:
    """One message, in pieces."""
    for piece in messages.pieces(x, comm.chunk_bytes):
        comm.library_recv(piece, src, tag)


def post_send(comm: Comm, x: torch.Tensor, dst: int, tag: int) -> list[Poll]:
    """One message, not waited for: what its pieces are asked with."""
    return [comm.post_send(piece, dst, tag) for piece in messages.pieces(x, comm.chunk_bytes)]


def post_recv(comm: Comm, x: torch.Tensor, src: int, tag: int) -> list[Poll]:
    """One message, not waited for: what its pieces are asked with."""
    return [comm.post_recv(piece, src, tag) for piece in messages.pieces(x, comm.chunk_bytes)]


def _shortcut(comm: Comm, x: torch.Tensor, op: str | None) -> Fast | None:
    """The way through shared memory if it takes this tensor; `op` is None where bytes only move."""
    if comm.size == 1 or (op is not None and (op != "sum" or x.dtype not in SUMMED_HERE)):
        return None
    is_ours = op is not None and _is_ordered(comm, x.dtype, op)
    return comm.fast() if x.nbytes >= comm.fast_bytes * (1 if is_ours else FAST_FACTOR) else None


def _is_ordered(comm: Comm, dtype: torch.dtype, op: str) -> bool:
    """Whether the order of reduction is ours; integers and extrema give the same bits in any order."""
    if dtype in HALF_FLOATS:
        return True
    rounds = op in ("sum", "prod") and (dtype in FLOATS or dtype in COMPLEX)
    return rounds and (comm.reduction == "ordered" or comm.size == 1)


def _normal(comm: Comm, x: torch.Tensor, op: str, scale: float) -> tuple[torch.Tensor, str, float]:
    x, op = as_reducible(x, op)
    return (x, "sum", scale / comm.size) if op == "avg" else (x, op, scale)


def _multiply(x: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        x.mul_(scale)
