"""Verbs on flat tensors in host memory: choice of algorithm, messages of bounded size, and order of reduction.

Ordered reductions work over any transport: equal shards are exchanged all-to-all, each rank sums one by a fixed tree
over ranks, in fp32 for 16-bit floats. Every element is summed by the same tree at any position, so neither windows nor
the caller's shards change a bit. Scratch is bounded by the window, and user buffers are never padded: only the last,
short window is copied into padded scratch. `Comm` checks and counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from mpispeed.mesh.collectives.transport import Posted
from mpispeed.native.reduce import tree_reduce, tree_sum
from mpispeed.native.status import address

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.group import Group
    from mpispeed.mesh.collectives.transport import Fast, Pairs

HALF_FLOATS = frozenset({torch.bfloat16, torch.float16})
"""Summed here in fp32 and never by an MPI library: some add the bit patterns without an error."""

FLOATS = frozenset({torch.float32, torch.float64})
SUMMED_HERE = FLOATS | HALF_FLOATS
"""What the tree over ranks adds without the help of a transport."""

COMPLEX = frozenset({torch.complex64, torch.complex128})

INTEGERS = frozenset(
    {
        torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    }
)  # fmt: skip

WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Torch neither adds nor compares them, so a transport has to."""

BITWISE = ("band", "bor", "bxor")
OPS = ("sum", "avg", "prod", "min", "max", *BITWISE)

_BOOL_OPS = {"sum": "max", "max": "max", "bor": "max", "prod": "min", "min": "min", "band": "min", "bxor": "bxor"}

SMALL_BYTES = 32 << 10
"""Below this many gathered bytes one all-gather and a local sum beat two collectives."""


def all_reduce(group: Group, x: torch.Tensor, op: str, scale: float) -> None:
    """Combine `x` in place. Collective over: `group`."""
    x, op, scale = normal(group, x, op, scale)
    fast = _shortcut(group, x, op)
    if fast is not None:
        fast.all_reduce(x, op, scale, group.threads)
    elif is_ordered(group, x.dtype, op):
        ordered_all_reduce(group, x, op, scale)
    else:
        for piece in pieces(x, group.limits.chunk_bytes):
            group.transport.library_all_reduce(piece, op)
        _multiply(x, scale)


def reduce(group: Group, x: torch.Tensor, root: int, op: str) -> None:
    """Combine into `x` of `root`; others keep theirs. Collective over: `group`."""
    x, op, scale = normal(group, x, op, 1.0)
    in_order = is_ordered(group, x.dtype, op)
    for piece in pieces(x, group.limits.window_bytes if in_order else group.limits.chunk_bytes):
        if in_order:
            copy = group.scratch("copy", piece.numel(), piece.dtype)
            copy.copy_(piece)
            ordered_all_reduce(group, copy, op, scale)
            if group.rank == root:
                piece.copy_(copy)
        else:
            group.transport.library_reduce(piece, root, op)
            if group.rank == root:
                _multiply(piece, scale)


def broadcast(group: Group, x: torch.Tensor, root: int) -> None:
    """Copy `x` of `root` to all. Collective over: `group`."""
    for piece in pieces(x, group.limits.chunk_bytes):
        group.transport.library_broadcast(piece, root)


def all_gather(group: Group, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order; `shard` may be the own slice of `out`. Collective over: `group`."""
    fast = _one_shot(group, shard, None) or _large(group, out)
    if fast is not None:
        fast.all_gather(out, shard)
    else:
        gather_chunks(group, out, shard)


def reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Combine `full` and keep this rank's shard; `shard` may be its slice of `full`. Collective over: `group`."""
    shard, _, _ = normal(group, shard, op, scale)
    full, op, scale = normal(group, full, op, scale)
    fast = _shortcut(group, full, op)
    if fast is not None:
        fast.reduce_scatter(shard, full, op, scale, group.threads)
    elif is_ordered(group, full.dtype, op):
        ordered_reduce_scatter(group, shard, full, op, scale)
    else:
        library_reduce_scatter(group, shard, full, op)
        _multiply(shard, scale)


def all_to_all(
    group: Group, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int] | None, counts: Sequence[int] | None
) -> None:
    """Equal parts, or parts of given lengths. Collective over: `group`."""
    if counts is None or out_counts is None:
        swap_chunks(group, out, x)
    else:
        exchange_parts(group, out, x, out_counts, counts)


def gather(group: Group, out: torch.Tensor, shard: torch.Tensor, root: int) -> None:
    """Equal shards in rank order into `out` of `root`. Collective over: `group`."""
    if group.rank != root:
        group.transport.exchange_pairs([(piece, root) for piece in pieces(shard, group.limits.chunk_bytes)], [])
        return
    places = out.view(group.size, shard.numel())
    group.transport.exchange_pairs([], _with_others(group, places))
    if places[root].data_ptr() != shard.data_ptr():
        places[root].copy_(shard)


def scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, root: int) -> None:
    """Equal parts of `full` of `root`, one for each rank. Collective over: `group`."""
    if group.rank != root:
        group.transport.exchange_pairs([], [(piece, root) for piece in pieces(shard, group.limits.chunk_bytes)])
        return
    parts = full.view(group.size, shard.numel())
    group.transport.exchange_pairs(_with_others(group, parts), [])
    if parts[root].data_ptr() != shard.data_ptr():
        shard.copy_(parts[root])


def _with_others(group: Group, rows: torch.Tensor) -> Pairs:
    """The row of each other rank, in pieces. Shapes: rows [size, n]."""
    others = (rank for rank in range(group.size) if rank != group.rank)
    return [(piece, rank) for rank in others for piece in pieces(rows[rank], group.limits.chunk_bytes)]


def send(group: Group, x: torch.Tensor, dst: int, tag: int) -> None:
    """One message, in pieces."""
    for piece in pieces(x, group.limits.chunk_bytes):
        group.transport.library_send(piece, dst, tag)


def recv(group: Group, x: torch.Tensor, src: int, tag: int) -> None:
    """One message, in pieces."""
    for piece in pieces(x, group.limits.chunk_bytes):
        group.transport.library_recv(piece, src, tag)


def post_send(group: Group, x: torch.Tensor, dst: int, tag: int) -> Posted:
    """One message in pieces, not waited for."""
    return Posted([group.transport.post_send(piece, dst, tag) for piece in pieces(x, group.limits.chunk_bytes)], x)


def post_recv(group: Group, x: torch.Tensor, src: int, tag: int) -> Posted:
    """One message in pieces, not waited for."""
    return Posted([group.transport.post_recv(piece, src, tag) for piece in pieces(x, group.limits.chunk_bytes)], x)


def _shortcut(group: Group, x: torch.Tensor, op: str) -> Fast | None:
    """The path through shared memory if it takes this tensor."""
    small = _one_shot(group, x, op)
    if small is not None or op != "sum" or x.dtype not in SUMMED_HERE:
        return small
    return _large(group, x)


def _large(group: Group, x: torch.Tensor) -> Fast | None:
    """That of large tensors."""
    return group.transport.fast() if group.size > 1 and x.nbytes >= group.limits.fast_bytes else None


def _one_shot(group: Group, x: torch.Tensor, op: str | None) -> Fast | None:
    """That of small tensors; `op` is None for verbs without reduction."""
    if group.size == 1 or x.nbytes > group.limits.one_shot_bytes or (op is not None and x.dtype in WIDE_UNSIGNED):
        return None
    small = group.transport.fast(is_small=True)
    return None if small is None or x.nbytes > small.limit_bytes else small


def is_ordered(group: Group, dtype: torch.dtype, op: str) -> bool:
    """True if the order of reduction is fixed here; integers and extrema give the same bits in any order."""
    if dtype in HALF_FLOATS:
        return True
    rounds = op in ("sum", "prod") and (dtype in FLOATS or dtype in COMPLEX)
    return rounds and (group.reduction == "ordered" or group.size == 1)


def normal(group: Group, x: torch.Tensor, op: str, scale: float) -> tuple[torch.Tensor, str, float]:
    """An equivalent view, operation and scale without averages and the special cases of `as_reducible`."""
    x, op = as_reducible(x, op)
    return (x, "sum", scale / group.size) if op == "avg" else (x, op, scale)


def _multiply(x: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        x.mul_(scale)


# -- ordered reductions ------------------------------------------------------------------------------------------------


def ordered_all_reduce(group: Group, x: torch.Tensor, op: str, scale: float) -> None:
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
        group.transport.allgather(everyone, x)
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
        group.transport.alltoall(parts, padded)
        own = padded[group.rank * cut : (group.rank + 1) * cut]
        combine(own, parts.view(size, cut).unbind(), op, scale=scale, threads=group.threads)
        group.transport.allgather(padded, own)
        if padded is not piece:
            piece.copy_(padded[: piece.numel()])


def ordered_reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
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
        group.transport.alltoall(parts, packed)
        target = shard[start : start + width]
        combine(target, parts.view(size, width).unbind(), op, scale=scale, threads=group.threads)


def combine(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, *, scale: float = 1.0, threads: int = 1) -> None:
    """Reduce `parts` in list order by neighbouring pairs and round once into `out`.

    `op` is "sum" (times `scale`), "prod", "min", "max" or bitwise; an average is a sum with a scale.
    """
    if op == "sum":
        tree_sum(out, parts, scale=scale, threads=threads)
    else:
        tree_reduce(out, parts, op)


def as_reducible(x: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """An equivalent view of `x` and operation without special cases.

    Booleans become bytes with "or" as max and "and" as min; sums of complex numbers are sums of their parts.
    """
    if x.dtype == torch.bool and op in _BOOL_OPS:
        return x.view(torch.uint8), _BOOL_OPS[op]
    if x.dtype in COMPLEX and op in ("sum", "avg"):
        return torch.view_as_real(x).view(-1), op
    return x, op


# -- messages of bounded size ------------------------------------------------------------------------------------------


def pieces(x: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Views of `x` of at most `limit_bytes` each; at least one, so that empty tensors still meet."""
    step = max(1, limit_bytes // x.itemsize)
    for start in range(0, max(1, x.numel()), step):
        yield x[start : start + step]


def gather_chunks(group: Group, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order."""
    if out.nbytes <= group.limits.chunk_bytes:
        group.transport.allgather(out, shard)
        return
    cut, window = shard.numel(), group.window_elements(out.dtype)
    columns = out.view(group.size, cut)
    for start in range(0, cut, window):
        piece = shard[start : start + window]
        packed = group.scratch("pack", piece.numel() * group.size, out.dtype)
        group.transport.allgather(packed, piece)
        columns[:, start : start + window].copy_(packed.view(group.size, -1))


def swap_chunks(group: Group, out: torch.Tensor, x: torch.Tensor) -> None:
    """Equal parts."""
    if out.nbytes <= group.limits.chunk_bytes:
        group.transport.alltoall(out, x)
        return
    size, window = group.size, group.window_elements(x.dtype)
    sources, targets = x.view(size, -1), out.view(size, -1)
    for start in range(0, sources.shape[1], window):
        part = sources[:, start : start + window]
        packed = group.scratch("pack", part.numel(), x.dtype)
        packed.view(part.shape).copy_(part)
        received = group.scratch("recv", part.numel(), x.dtype)
        group.transport.alltoall(received, packed)
        targets[:, start : start + window].copy_(received.view(part.shape))


def exchange_parts(
    group: Group, out: torch.Tensor, x: torch.Tensor, out_counts: Sequence[int], counts: Sequence[int]
) -> None:
    """Parts of given sizes; both ends of a pair know its count, so they split it alike without agreement."""
    parts = [x[end - n : end] for n, end in zip(counts, accumulate(counts), strict=True)]
    places = [out[end - n : end] for n, end in zip(out_counts, accumulate(out_counts), strict=True)]
    places[group.rank].copy_(parts[group.rank])
    order = [(group.rank + step) % group.size for step in range(1, group.size)]
    limit = group.limits.chunk_bytes
    sends = [(piece, j) for j in order if counts[j] for piece in pieces(parts[j], limit)]
    recvs = [(piece, j) for j in reversed(order) if out_counts[j] for piece in pieces(places[j], limit)]
    group.transport.exchange_pairs(sends, recvs)


def library_reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """By the library; shards too large for one message go through packed windows."""
    if full.nbytes <= group.limits.chunk_bytes:
        if not overlaps(full, shard):
            group.transport.library_reduce_scatter(shard, full, op)
            return
        apart = group.scratch("recv", shard.numel(), shard.dtype)
        group.transport.library_reduce_scatter(apart, full, op)
        shard.copy_(apart)
        return
    cut, window = shard.numel(), group.window_elements(full.dtype)
    columns = full.view(group.size, cut)
    for start in range(0, cut, window):
        part = columns[:, start : start + window]
        packed = group.scratch("pack", part.numel(), full.dtype)
        packed.view(part.shape).copy_(part)
        group.transport.library_reduce_scatter(shard[start : start + window], packed, op)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two contiguous tensors share bytes."""
    begin, other = address(a), address(b)
    return a.device == b.device and begin < other + b.nbytes and other < begin + a.nbytes


def is_own_cut(whole: torch.Tensor, part: torch.Tensor, rank: int) -> bool:
    """True if `part` is the slice of `rank` in `whole`."""
    return (
        part.dtype == whole.dtype
        and part.device == whole.device
        and address(part) == address(whole) + rank * part.nbytes
    )
