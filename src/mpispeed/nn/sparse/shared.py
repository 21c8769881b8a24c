"""Attention over blocks of a sequence that ranks share: each has all tokens of some heads, as in Ulysses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpispeed.base.errors import UnimplementedUse
from mpispeed.mesh.comm import Comm
from mpispeed.nn.attention.core import as_autocast, check
from mpispeed.nn.sequence.attention import check_cut, idle
from mpispeed.nn.sequence.running import Eager, Running, tell
from mpispeed.nn.sequence.ulysses import Trade, to_heads, to_tokens

Attend = Callable[[Tensor, Tensor, Tensor, tuple[int, int], Tensor | None], Tensor]
"""Called with query, key and value [B, own heads, S, d], which heads these are, and what is added for keys [B, S]."""


def require_servable(running: Running, *masks: Tensor | None) -> None:
    """Refuse what needs more than some heads of the whole sequence.

    Raises:
        UnimplementedUse: the cut is a ring, masks are given, or a row has several documents.
    """
    layout, msg = running.layout, ""
    if layout.ring > 1:
        msg = f"the sequence is cut around a ring of {layout.ring}, and patterns of blocks need all of it for a head; "
        msg += "set sequence_parallel.ring_size to 1"
    elif any(mask is not None for mask in masks):
        msg = (
            f"masks are given for a sequence that {layout.ulysses} ranks share; leave them out: padding is known from "
        )
        msg += "the batch that was cut"
    elif layout.spans is not None and any(len(row) > 1 for row in layout.spans):
        msg = "a row has several documents, which patterns of blocks do not tell apart; give rows of one document"
    if msg:
        raise UnimplementedUse(msg)


def attend_shared(q: Tensor, k: Tensor, v: Tensor, running: Running, comm: Comm, attend: Attend) -> Tensor:
    """Trade heads for tokens, attend, and trade back; differentiable.

    Args:
        q: [B, h, tokens of this rank, d].
        k: as `q`.
        v: as `q`.
        running: the cut, by heads only.
        comm: the ranks that share the sequence.
        attend: the attention of own heads.

    Collective over: the ranks of `comm`; the same in backward.

    Raises:
        UsageError: the tensors are not this rank's part of the running batch.
    """
    return _attend_shared.run(q, k, v, running, comm, attend)


@Eager
def _attend_shared(q: Tensor, k: Tensor, v: Tensor, running: Running, comm: Comm, attend: Attend) -> Tensor:
    q, k, v = as_autocast(q, k, v)
    check(q, k, v)
    check_cut(q, k, running)
    trade = Trade(comm, running.layout.ulysses_counts(0), q.shape[1], q.shape[1])
    q, k, v = to_heads(q, k, v, trade)
    own = trade.queries(trade.comm.rank)
    # fewer heads than ranks: one may have none
    out = attend(q, k, v, own, _padding(running, q)) if q.shape[1] else idle(q, k, v)
    out = to_tokens(out, trade)
    if out.requires_grad:
        out.register_hook(lambda _: tell(running))
    return out


def _padding(running: Running, q: Tensor) -> Tensor | None:
    """-inf for keys of no document, [B, S]."""
    if running.layout.spans is None:
        return None
    added = torch.full((q.shape[0], running.layout.length), -torch.inf, device=q.device)
    rows = running.layout.spans if len(running.layout.spans) > 1 else running.layout.spans * q.shape[0]
    for row, spans in enumerate(rows):
        for start, stop in spans:
            added[row, start:stop] = 0
    return added
