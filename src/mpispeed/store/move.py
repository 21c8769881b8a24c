"""Carries out placement moves on a mesh: the one place where a placement becomes a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError
from mpispeed.store.layout import Span
from mpispeed.store.placement import Placement, moves, reduce_moves

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh


def own_span(mesh: Mesh, placement: Placement, padded: int) -> Span:
    """The range of a flat buffer of `padded` elements that this rank holds under `placement`."""
    start, size = 0, padded
    for axis in placement.axes:
        parts = mesh[axis].size
        if size % parts:
            msg = f"a range of {size} elements does not cut into {parts} equal parts over axis {axis!r}"
            raise StoreError(msg)
        size //= parts
        start += mesh.index(axis) * size
    return Span(start, start + size)


def reduce_into(
    mesh: Mesh,
    full: torch.Tensor,
    target: torch.Tensor,
    partial: tuple[str, ...],
    placement: Placement,
    *,
    scale: float = 1.0,
) -> None:
    """Sum `full` over the axes `partial` and leave `scale` times this rank's part in `target`.

    `target` may be (a slice of) `full`. `full` is used as scratch when the target is cut.

    Collective over: the axes `partial`.
    Shapes: full [padded], target [elements of this rank under `placement`].
    """
    todo = reduce_moves(partial, placement)
    source, scatters = full, len(placement.axes)
    for position, move in enumerate(todo):
        factor = scale if position == len(todo) - 1 else 1.0
        if move.verb == "reduce_scatter":
            comm = mesh[move.axes[0]]
            part = source.numel() // comm.size
            shard = target if position == scatters - 1 else source[comm.rank * part : (comm.rank + 1) * part]
            comm.reduce_scatter(shard, source, scale=factor)
            source = shard
        else:
            mesh[move.axes].all_reduce(source, scale=factor)
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)


def gather_whole(mesh: Mesh, full: torch.Tensor, placement: Placement) -> None:
    """Make every rank's `full` whole; this rank's part under `placement` already stands in its place.

    Collective over: the axes of `placement`.
    """
    span = own_span(mesh, placement, full.numel())
    for move in moves(placement, Placement()):
        comm = mesh[move.axes[0]]
        size = span.numel * comm.size
        start = span.start - mesh.index(move.axes[0]) * span.numel
        comm.all_gather(full[start : start + size], full[span.slice])
        span = Span(start, start + size)
