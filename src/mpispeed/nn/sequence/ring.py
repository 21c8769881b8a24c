"""Attention whose keys and values travel around a ring, a block of one place at a time, beside the computation.

A place holds two blocks: the one it computes with and the one that arrives. In backward the sums for the gradients of a
block follow it around, one place behind, and come home after the last; half of the own block is computed meanwhile.
So what a place holds depends on its own tokens, not on the number of places.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpispeed.mesh.collectives.work import Work
from mpispeed.mesh.comm import Comm
from mpispeed.nn.attention.core import begin, check, run, run_backward
from mpispeed.nn.attention.kernels import wide
from mpispeed.nn.attention.pieces import Piece, pieces_of
from mpispeed.nn.sequence.layout import Layout, Range, Spans

_FORWARD, _BACKWARD, _GRADS = 1, 2, 3
"""Tags of messages."""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, comm: Comm, layout: Layout, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Attention of this place's queries to the keys of all places, differentiable.

    Bytes sent by place p, of R places that have S_0, ..., S_(R-1) tokens, with w = 2 * B * h_kv * d bytes of keys and
    values a token: forward w * (S_p + S_(p-1) + ... + S_(p-R+2)), the blocks that pass through it; backward the same
    again, and sums of gradients (in fp32 where w is in 16 bits) of all tokens but S_p.

    Args:
        q: [B, h, S, d], tokens of this place in the order of `layout.ring_ranges`.
        k: [B, h_kv, S, d].
        v: as `k`.
        comm: the places.
        layout: the cut.
        causal: tokens see none that come later.
        scale: of the scores; None: 1 / sqrt(d).

    Returns:
        [B, h, S, d].

    Collective over: `comm`; the same in backward.
    """
    check(q, k, v)
    out: Tensor = _Ring.apply(q, k, v, comm, layout, causal, scale)
    return out


@functools.lru_cache(maxsize=512)
def cached_pieces(
    queries: tuple[Range, ...], keys: tuple[Range, ...], causal: bool, spans: Spans | None
) -> tuple[Piece, ...]:
    """As `pieces_of`; layers of a pass ask for the same ones."""
    return tuple(pieces_of(queries, keys, causal=causal, spans=spans))


class _Turns:
    """The blocks that a place computes with, in turn: its own, then that of the place before, and so on.

    Attributes:
        src: the place whose tokens the block in hand has.
        keys, values: the block in hand; of the first turn the own tensors.
    """

    def __init__(self, k: Tensor, v: Tensor, comm: Comm, layout: Layout, tag: int) -> None:
        self.comm, self.layout, self._tag = comm, layout, tag
        rows, heads, _, width = k.shape
        self._token = 2 * rows * heads * width
        self._shape = rows, heads, width
        longest = max(layout.ring_count(place) for place in range(comm.size))
        self._hand, self._next = (k.new_empty(longest * self._token) for _ in range(2))
        self.src, self.turn = comm.rank, 0
        own = self._block(self._hand, self.src)
        own[0], own[1] = k, v
        self.keys, self.values = own[0], own[1]
        self._works: list[Work] = []

    def pieces(self, causal: bool) -> tuple[Piece, ...]:
        """What the own queries see of the block in hand."""
        own = self.layout.ring_ranges(self.comm.rank)
        return cached_pieces(own, self.layout.ring_ranges(self.src), causal, self.layout.spans)

    def start(self) -> None:
        """Start to pass the block in hand on, unless it has been everywhere."""
        if self.turn == self.comm.size - 1:
            return
        size, rank = self.comm.size, self.comm.rank
        arriving = self._block(self._next, (self.src - 1) % size)
        leaving = self._block(self._hand, self.src)
        if arriving.numel():
            self._works.append(self.comm.start_recv(arriving.view(-1), (rank - 1) % size, self._tag))
        if leaving.numel():
            self._works.append(self.comm.start_send(leaving.view(-1), (rank + 1) % size, self._tag))

    def step(self) -> None:
        """Take the block that arrives in hand; `start` has been called."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        self._hand, self._next = self._next, self._hand
        self.src, self.turn = (self.src - 1) % self.comm.size, self.turn + 1
        self.keys, self.values = self._block(self._hand, self.src)

    def _block(self, flat: Tensor, src: int) -> Tensor:
        rows, heads, width = self._shape
        count = self.layout.ring_count(src)
        return flat[: count * self._token].view(2, rows, heads, count, width)


class _Home:
    """Sums for gradients of keys and values that follow their blocks; those of the own block stay and wait for theirs.

    Attributes:
        own: sums of this place's own block, [2, B, h_kv, S, d] in fp32 (fp64 for fp64).
    """

    def __init__(self, k: Tensor, comm: Comm, layout: Layout) -> None:
        self.comm, self.layout = comm, layout
        self._dtype, self._device = wide(k.dtype), k.device
        self._shape = k.shape
        self.own = self._zeros(comm.rank)
        self._leaving: tuple[Work | None, Tensor | None] = (None, None)
        self._arriving: tuple[Work | None, Tensor | None] = (None, None)

    def expect(self, src: int) -> Tensor:
        """Empty sums for the block of place `src`; those of the places before are received meanwhile, if any."""
        if src != (self.comm.rank - 1) % self.comm.size:  # the place before is the first to add to these
            self._arriving = self._receive(src)
        return self._zeros(src)

    def pass_on(self, sums: Tensor) -> None:
        """Add what has arrived to `sums` and send them to the next place."""
        self._add_arrived(sums)
        if self._leaving[0] is not None:
            self._leaving[0].wait()
        size, rank = self.comm.size, self.comm.rank
        work = self.comm.start_send(sums.view(-1), (rank + 1) % size, _GRADS) if sums.numel() else None
        self._leaving = work, sums

    def call_home(self) -> None:
        """Begin to receive the sums of the own block."""
        self._arriving = self._receive(self.comm.rank)

    def finish(self) -> None:
        """Wait for everything; then `own` is whole."""
        self._add_arrived(self.own)
        if self._leaving[0] is not None:
            self._leaving[0].wait()

    def _add_arrived(self, sums: Tensor) -> None:
        work, arrived = self._arriving
        self._arriving = None, None
        if work is not None and arrived is not None:
            work.wait()
            sums += arrived

    def _receive(self, src: int) -> tuple[Work | None, Tensor | None]:
        buffer = torch.empty_like(self._zeros(src))
        if not buffer.numel():
            return None, None
        return self.comm.start_recv(buffer.view(-1), (self.comm.rank - 1) % self.comm.size, _GRADS), buffer

    def _zeros(self, src: int) -> Tensor:
        rows, heads, _, width = self._shape
        count = self.layout.ring_count(src)
        return torch.zeros(2, rows, heads, count, width, dtype=self._dtype, device=self._device)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, layout: Layout, causal: bool, scale: float | None
    ) -> Tensor:
        turns, sums = _Turns(k, v, comm, layout, _FORWARD), begin(q)
        for turn in range(comm.size):
            if turn:
                turns.step()
            turns.start()
            run(q, turns.keys, turns.values, turns.pieces(causal), scale, into=sums)
        out, lse = sums[0].to(q.dtype), sums[1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.comm, ctx.layout, ctx.causal, ctx.scale = comm, layout, causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        comm: Comm = ctx.comm
        dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        turns, home = _Turns(k, v, comm, ctx.layout, _BACKWARD), _Home(k, comm, ctx.layout)
        now, later = halves(turns.pieces(ctx.causal))

        def add(keys: Tensor, values: Tensor, pieces: Sequence[Piece], grads: Tensor) -> None:
            run_backward(grad, q, keys, values, out, lse, pieces, ctx.scale, into=(dq, grads[0], grads[1]))

        turns.start()
        add(k, v, now, home.own)
        for _ in range(comm.size - 1):
            turns.step()
            turns.start()
            grads = home.expect(turns.src)
            add(turns.keys, turns.values, turns.pieces(ctx.causal), grads)
            home.pass_on(grads)
        home.call_home()
        add(k, v, later, home.own)
        home.finish()
        return dq.to(q.dtype), home.own[0].to(k.dtype), home.own[1].to(v.dtype), None, None, None, None


def halves(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The same pairs in two lists of about equal work; a piece of more than half of it is divided."""
    total = sum(_work(piece) for piece in pieces)
    single: list[Piece] = []
    for piece in pieces:
        single += _divided(piece) if 2 * _work(piece) > total else [piece]
    now: list[Piece] = []
    later: list[Piece] = []
    done = 0.0
    for piece in sorted(single, key=_work, reverse=True):
        if 2 * done < total - _work(piece) / 2:
            now.append(piece)
            done += _work(piece)
        else:
            later.append(piece)
    return now, later


def _work(piece: Piece) -> float:
    """Pairs of tokens."""
    queries, keys = (end - start for start, end in (piece.queries, piece.keys))
    return queries * (keys + 1) / 2 if piece.is_causal else queries * keys


def _divided(piece: Piece) -> list[Piece]:
    (start, end), (first, last) = piece.queries, piece.keys
    half = (end - start) // 2
    if not half:
        return [piece]
    early, late = (start, start + half), (start + half, end)
    if not piece.is_causal:
        return [piece._replace(queries=early), piece._replace(queries=late)]
    before, after = (first, first + half), (first + half, last)
    return [
        Piece(late, before, row=piece.row),
        Piece(early, before, is_causal=True, row=piece.row),
        Piece(late, after, is_causal=True, row=piece.row),
    ]
