"""Attention over a list of pieces, forward and backward, differentiable or step by step (a ring calls the steps)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.nn.attention.kernels import merge, partial, partial_backward, wide
from mpispeed.nn.attention.pieces import Piece

Sums = tuple[Tensor, Tensor]


def begin(q: Tensor) -> Sums:
    """Accumulators of output and log-sum-exp for `run(into=...)`: nothing seen yet.

    Args:
        q: [B, h, S, d].

    Returns:
        zeros [B, h, S, d] and -inf [B, h, S], both fp32 (fp64 for fp64).
    """
    dtype = wide(q.dtype)
    return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)


def run(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float | None = None, *, into: Sums | None = None
) -> Sums:
    """Attention over `pieces`, without autograd.

    Args:
        q: [B, h, S, d].
        k: [B, h_kv, S_k, d]; h is a multiple of h_kv.
        v: as `k`.
        pieces: what attends to what; no pair twice.
        scale: of the scores; None: 1 / sqrt(d).
        into: accumulators from `begin`, to which these pieces are merged, in place; for keys that come in several
            parts.

    Returns:
        Output in q's dtype (`into[0]` if given) and log-sum-exp [B, h, S] in fp32 (fp64 for fp64); 0 and -inf for
        queries without a key.
    """
    if into is None and len(pieces) == 1 and _is_whole(pieces[0], q, k):
        return partial(q, k, v, is_causal=pieces[0].is_causal, scale=scale)
    out, lse = begin(q) if into is None else into
    # pieces in order: a query was seen before if it lies before the end of what came so far
    ends: dict[int | None, int] = {}
    for piece in sorted(pieces, key=lambda piece: piece.queries):
        rows, queries, keys = _where(piece)
        part, part_lse = partial(
            q[rows, :, queries], k[rows, :, keys], v[rows, :, keys], is_causal=piece.is_causal, scale=scale
        )
        end = max(ends.values(), default=0) if piece.row is None else max(ends.get(piece.row, 0), ends.get(None, 0))
        if into is not None or piece.queries[0] < end:
            merge(out[rows, :, queries], lse[rows, :, queries], part, part_lse)
        else:
            out[rows, :, queries], lse[rows, :, queries] = part, part_lse
        ends[piece.row] = max(ends.get(piece.row, 0), piece.queries[1])
    return (out.to(q.dtype) if into is None else out), lse


def run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Sequence[Piece],
    scale: float | None = None,
    *,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `pieces` add to the gradients of q, k, v, without autograd.

    Args:
        grad: gradient of the whole output, [B, h, S, d].
        q: as in `run`.
        k: as in `run`.
        v: as in `run`.
        out: the whole output of these queries (of all pieces and all parts of the keys), in q's dtype.
        lse: the whole log-sum-exp.
        pieces: as in `run`.
        scale: as in `run`.
        into: accumulators for dq, dk, dv in fp32 (fp64 for fp64), added to in place.

    Returns:
        dq, dk, dv in the dtypes of q, k, v, or `into`.
    """
    if into is None and len(pieces) == 1 and _is_whole(pieces[0], q, k):
        return partial_backward(grad, q, k, v, out, lse, is_causal=pieces[0].is_causal, scale=scale)
    sums = into
    if sums is None:
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q, k, v))
        sums = dq, dk, dv
    for piece in pieces:
        rows, queries, keys = _where(piece)
        found = partial_backward(
            grad[rows, :, queries],
            q[rows, :, queries],
            k[rows, :, keys],
            v[rows, :, keys],
            out[rows, :, queries],
            lse[rows, :, queries],
            is_causal=piece.is_causal,
            scale=scale,
        )
        for total, part, along in zip(sums, found, (queries, keys, keys), strict=True):
            total[rows, :, along] += part
    if into is not None:
        return into
    return sums[0].to(q.dtype), sums[1].to(k.dtype), sums[2].to(v.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], *, scale: float | None = None) -> Tensor:
    """Differentiable attention over `pieces`.

    Args:
        q: [B, h, S, d], fp32, bf16, fp16 or fp64.
        k: [B, h_kv, S_k, d]; h is a multiple of h_kv.
        v: as `k`.
        pieces: what attends to what, see `pieces_of`.
        scale: of the scores; None: 1 / sqrt(d).

    Returns:
        [B, h, S, d]; zeros for queries that no piece names.

    Raises:
        UsageError: shapes or dtypes do not fit, or a piece names tokens that are not there.
    """
    q, k, v = as_autocast(q, k, v)
    check(q, k, v, pieces)
    out: Tensor = _Attend.apply(q, k, v, tuple(pieces), scale)
    return out


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in the dtype that torch.autocast gives to attention where it is on, as torch's own attention does.

    Args:
        q: any shape; fp64 stays as it is.
        k: likewise.
        v: likewise.
    """
    kind = q.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece] = ()) -> None:
    """Refuses tensors that are no queries, keys and values of one attention, and pieces beyond them.

    Raises:
        UsageError: what does not fit.
    """
    shapes = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        msg = f"attention takes q [B, h, S, d] and k, v [B, h_kv, S_k, d] with one B and d, not {shapes}"
        raise UsageError(msg)
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        msg = f"attention takes q, k, v of one floating dtype, not {shapes}; cast them to one"
        raise UsageError(msg)
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        msg = f"the heads of q have to be a multiple of the heads of k and v: {shapes}"
        raise UsageError(msg)
    for piece in pieces:
        (start, stop), (first, last) = piece.queries, piece.keys
        is_inside = 0 <= start <= stop <= q.shape[2] and 0 <= first <= last <= k.shape[2]
        is_inside &= piece.row is None or 0 <= piece.row < q.shape[0]
        if not is_inside or (piece.is_causal and stop - start != last - first):
            msg = f"{piece} names tokens or rows that are not there, or is causal and no square: {shapes}"
            raise UsageError(msg)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: tuple[Piece, ...], scale: float | None) -> Tensor:
        out, lse = run(q, k, v, pieces, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *run_backward(grad, q, k, v, out, lse, ctx.pieces, ctx.scale), None, None


def _is_whole(piece: Piece, q: Tensor, k: Tensor) -> bool:
    return piece.row is None and piece.queries == (0, q.shape[2]) and piece.keys == (0, k.shape[2])


def _where(piece: Piece) -> tuple[slice, slice, slice]:
    rows = slice(None) if piece.row is None else slice(piece.row, piece.row + 1)
    return rows, slice(*piece.queries), slice(*piece.keys)
