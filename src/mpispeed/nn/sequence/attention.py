"""Attention of a sequence that ranks share: Ulysses inside of a place, a ring across places, or one process alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mpispeed.base.errors import UsageError
from mpispeed.nn.attention.core import as_autocast, attend, check
from mpispeed.nn.attention.pieces import Piece
from mpispeed.nn.sequence.layout import Layout
from mpispeed.nn.sequence.ring import cached_pieces, ring_attention
from mpispeed.nn.sequence.running import Eager, Running, current, tell
from mpispeed.nn.sequence.ulysses import Trade, to_heads, to_tokens


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    running: Running | None = None,
) -> Tensor:
    """Exact attention to the whole sequence, of which this rank has a part; differentiable.

    Args:
        q: [B, h, S, d], the tokens of this rank, in fp32, bf16, fp16 or fp64.
        k: [B, h_kv, S, d]; h is a multiple of h_kv. Without a cut it may have another length, if not causal.
        v: as `k`.
        causal: tokens see none that come later; None: as the running pass says, True without one.
        scale: of the scores; None: 1 / sqrt(d).
        dropout: share of the weights that are dropped; each rank draws for its own heads.
        running: how the sequence is cut; None: as the running pass says. Without any, this process has all of it.

    Returns:
        [B, h, S, d]; zeros for padding (tokens in no document).

    Raises:
        UsageError: shapes do not fit each other or the cut, or dropout is asked for in a ring.

    Collective over: the ranks of the sequence axis; the same in backward, so the loss of every rank has to depend on
        its output, also where none of its tokens counts.
    """
    return _attention.run(q, k, v, causal, scale, dropout, running)


@Eager
def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool | None, scale: float | None, dropout: float, running: Running | None
) -> Tensor:
    q, k, v = as_autocast(q, k, v)
    check(q, k, v)
    found = current() if running is None else running
    causal = (True if found is None else found.is_causal) if causal is None else causal
    if found is None:
        return _alone(q, k, v, Layout(q.shape[2]), causal, scale, dropout)
    check_cut(q, k, found)
    out = _cut(q, k, v, found, causal, scale, dropout)
    if out.requires_grad:
        out.register_hook(lambda _: tell(found))
    return out


def _cut(
    q: Tensor, k: Tensor, v: Tensor, running: Running, causal: bool, scale: float | None, dropout: float
) -> Tensor:
    group, layout = running.group, running.layout
    if group is None or group.size == 1:
        return _alone(q, k, v, layout, causal, scale, dropout)
    if dropout and layout.ring > 1:
        msg = (
            f"attention dropout of {dropout} in a ring of {layout.ring} ranks: the weights of a query are spread over "
            "ranks, and the kernels that give parts of them draw nothing; set attention dropout to 0, or "
            "sequence_parallel.ring_size to 1"
        )
        raise UsageError(msg)
    trade = Trade(group.ulysses, layout.ulysses_counts(group.ring.rank), q.shape[1], k.shape[1])
    q, k, v = to_heads(q, k, v, trade)
    if not q.shape[1]:  # fewer heads than ranks: its keys and values have none either
        out = idle(q, k, v)
    elif layout.ring > 1:
        out = ring_attention(q, k, v, group.ring, layout, causal=causal, scale=scale)
    else:
        out = _alone(q, k, v, layout, causal, scale, dropout)
    return to_tokens(out, trade)


def idle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An output without heads that keeps the graph, so that backward is collective here too. Local."""
    return q + (k.sum() + v.sum())


def _alone(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, causal: bool, scale: float | None, dropout: float
) -> Tensor:
    """Attention of a process that has all tokens of its heads."""
    length = k.shape[2]
    if causal and length != q.shape[2]:
        msg = (
            f"causal attention of {q.shape[2]} queries to {length} keys: it is not known where the queries lie; pass "
            "all of them, or causal=False"
        )
        raise UsageError(msg)
    whole = ((0, q.shape[2]),)
    pieces = cached_pieces(whole, ((0, length),), causal, layout.spans)
    if not dropout or not pieces:  # without pieces zeros that keep the graph
        return attend(q, k, v, pieces, scale=scale)
    return _with_dropout(q, k, v, pieces, scale, dropout)


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, pieces: tuple[Piece, ...], scale: float | None, dropout: float
) -> Tensor:
    """By torch's attention, document by document; the pieces have no queries in common."""
    out = torch.zeros_like(q)
    for piece in pieces:
        rows = slice(None) if piece.row is None else slice(piece.row, piece.row + 1)
        queries, keys = slice(*piece.queries), slice(*piece.keys)
        out[rows, :, queries] = functional.scaled_dot_product_attention(
            q[rows, :, queries],
            k[rows, :, keys],
            v[rows, :, keys],
            dropout_p=dropout,
            is_causal=piece.is_causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out


def check_cut(q: Tensor, k: Tensor, running: Running) -> None:
    """Refuse tensors that are not this rank's part of the running batch. Local.

    Raises:
        UsageError: other tokens or rows.
    """
    layout, rank = running.layout, running.rank
    count = layout.count(rank)
    if not q.shape[2] == k.shape[2] == count:
        msg = (
            f"attention got {q.shape[2]} queries and {k.shape[2]} keys, but rank {rank} of the sequence axis has "
            f"{count} of the {layout.length} tokens of the running batch: pass all of its tokens and no others; the "
            "bare model takes whole sequences, to evaluate or generate, in `with mpispeed.sequence.use(None):`"
        )
        raise UsageError(msg)
    if layout.spans is not None and len(layout.spans) not in (1, q.shape[0]):
        msg = f"the running batch has documents of {len(layout.spans)} rows, and attention got {q.shape[0]} rows"
        raise UsageError(msg)
