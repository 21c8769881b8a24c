"""Placement moves carried out on a mesh as collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError
from mpispeed.mesh.collectives.host_collectives import HALF_FLOATS
from mpispeed.store.arena import Arena
from mpispeed.store.layout import Span
from mpispeed.store.placement import Move, Placement, moves, reduce_moves

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Axes, Mesh


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


def remaining_axes(mesh: Mesh, placement: Placement, over: Axes) -> tuple[str, ...]:
    """Fine axes among `over` that `placement` does not shard over: ranks along them hold equal copies."""
    cut = mesh.topology.resolve(placement.axes)
    return tuple(axis for axis in mesh.topology.resolve(over) if axis not in cut)


def own_share(mesh: Mesh, placement: Placement, padded: int, over: Axes) -> Span:
    """This rank's exclusive part of `own_span`: copies along the axes `over` are divided into equal parts.

    Over all ranks of `over` the shares tile the buffer exactly once, whatever the placement.
    """
    rest = remaining_axes(mesh, placement, over)
    return own_span(mesh, Placement((*placement.axes, *reversed(rest))), padded)


def receives(shard: torch.dtype, wire: torch.dtype) -> bool:
    """True if a reduce-scatter of `wire` can deliver into `shard` directly."""
    return shard == wire or (shard == torch.float32 and wire in HALF_FLOATS)


def reduce_into(
    mesh: Mesh,
    full: torch.Tensor,
    target: torch.Tensor,
    partial: Axes,
    placement: Placement,
    *,
    scale: float = 1.0,
    scatters: bool = True,
    arena: Arena | None = None,
) -> None:
    """Sum `full` over the axes `partial` and leave `scale` times this rank's part in `target`.

    `target` may be (a slice of) `full`, and of another dtype. `full` is used as scratch when the target is sharded.
    Sums of 16-bit floats that take several hops stay in fp32 between them, so that they round as in one hop.

    Args:
        mesh: the ranks.
        full: a full buffer of partial sums.
        target: this rank's range under `placement`.
        partial: axes along which ranks hold different sums.
        placement: of the result.
        scale: factor of the sum.
        scatters: False: all-reduce, and take the own range of it.
        arena: gives scratch.

    Collective over: the axes `partial`.
    Shapes: full [padded], target [elements of this rank under `placement`].
    """
    own = set(mesh.topology.resolve(partial))
    cuts = [axis for axis in placement.axes if own >= set(mesh.topology.resolve(axis))]
    todo = reduce_moves((*cuts, *remaining_axes(mesh, placement, partial)), placement)
    todo = todo or (Move("all_reduce", ()),)  # no other rank has copies
    if not scatters:
        mesh[partial].all_reduce(full, scale=scale)
        full = full[own_span(mesh, placement, full.numel()).slice]
        todo = ()
    arena = arena or Arena()
    todo = tuple(move for move in todo if mesh[move.axes].size > 1) or todo[:1]  # one rank alone still scales
    source, borrowed = full, []
    for position, move in enumerate(todo):
        comm, factor = mesh[move.axes], scale if position == len(todo) - 1 else 1.0
        if move.verb == "all_reduce":
            comm.all_reduce(source, scale=factor)
            continue
        part = source.numel() // comm.size
        if part == target.numel() and receives(target.dtype, source.dtype):
            shard = target
        elif source.dtype in HALF_FLOATS:
            shard = arena.take(part, torch.float32, on_host=source.device.type == "cpu")
            borrowed.append(shard)
        else:
            shard = source[comm.rank * part : (comm.rank + 1) * part]
        comm.reduce_scatter(shard, source, scale=factor)
        source = shard
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
    for buffer in borrowed:
        arena.give(buffer)


def all_gather_into(
    mesh: Mesh,
    out: torch.Tensor,
    shard: torch.Tensor,
    source: Placement,
    target: Placement,
    padded: int,
    *,
    hop: Callable[[Comm, torch.Tensor, torch.Tensor], None] | None = None,
) -> None:
    """Gather this rank's range under `target` of a flat buffer that is sharded as `source` into `out`.

    `shard` may be its own slice of `out`. `hop` does the work of `Comm.all_gather` in its place.

    Collective over: the axes over which `source` is sharded and `target` is not.
    Shapes: out [elements of this rank under `target`], shard [elements of this rank under `source`].
    """
    span, origin = own_span(mesh, source, padded), own_span(mesh, target, padded).start
    for move in moves(source, target):
        comm = mesh[move.axes[0]]
        start = span.start - mesh.index(move.axes[0]) * span.numel
        span = Span(start, start + span.numel * comm.size)
        piece = out[span.shifted(-origin).slice]
        if hop is None:
            comm.all_gather(piece, shard)
        else:
            hop(comm, piece, shard)
        shard = piece
    if shard.data_ptr() != out.data_ptr():
        out.copy_(shard)
