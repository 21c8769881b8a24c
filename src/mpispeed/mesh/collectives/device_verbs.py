"""The verbs on tensors of a device: by the group's path for them where it has one, staged through the host elsewhere.

With a path every tensor of a verb may be on the device or the host, as long as one is on the device on each rank; both
ends of a message are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mpispeed.base.device import is_on_device
from mpispeed.mesh.collectives import device_collectives as staged
from mpispeed.mesh.collectives import host_collectives
from mpispeed.mesh.collectives.device_path import DevicePath
from mpispeed.mesh.collectives.group import Group
from mpispeed.mesh.collectives.host_collectives import COMPLEX, WIDE_UNSIGNED
from mpispeed.mesh.collectives.transport import Posted

Counts = Sequence[int] | None


def all_reduce(group: Group, x: torch.Tensor, op: str, scale: float) -> None:
    """Combine `x` in place. Collective over: `group`."""
    path = _path_of_sums(group, x, op)
    if path is None:
        staged.all_reduce(group, x, op, scale)
        return
    x, op, scale = host_collectives.normal(group, x, op, scale)
    if path.has_sums and not host_collectives.is_ordered(group, x.dtype, op):
        path.library_all_reduce(x, op)
        _multiply(x, scale)
    else:
        path.all_reduce(x, op, scale)


def reduce(group: Group, x: torch.Tensor, root: int, op: str) -> None:
    """Combine into `x` of `root`; others keep theirs. Collective over: `group`."""
    if _path_of_sums(group, x, op) is None:
        staged.reduce(group, x, root, op)
        return
    for piece in host_collectives.pieces(x, group.limits.window_bytes):
        copy = piece.clone()
        all_reduce(group, copy, op, 1.0)
        if group.rank == root:
            piece.copy_(copy)


def reduce_scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
    """Combine `full` and keep this rank's shard, also where one of them is on the host. Collective over: `group`."""
    path = _path_of_sums(group, full, op)
    if path is None:
        staged.reduce_scatter(group, shard, full, op, scale)
        return
    place = _there(path, shard)
    out, _, _ = host_collectives.normal(group, place, op, scale)
    full, op, scale = host_collectives.normal(group, _brought(path, full), op, scale)
    if path.has_sums and not host_collectives.is_ordered(group, full.dtype, op):
        path.library_reduce_scatter(out, full, op)
        _multiply(out, scale)
    else:
        path.reduce_scatter(out, full, op, scale)
    _return(shard, place)


def broadcast(group: Group, x: torch.Tensor, root: int) -> None:
    """Copy `x` of `root` to all. Collective over: `group`."""
    path = _path(group)
    if path is None:
        staged.broadcast(group, x, root)
    else:
        path.broadcast(x, root)


def all_gather(group: Group, out: torch.Tensor, shard: torch.Tensor) -> None:
    """Equal shards in rank order, also where one of the tensors is on the host. Collective over: `group`."""
    path = _path(group)
    if path is None:
        staged.all_gather(group, out, shard)
        return
    place = _there(path, out)
    path.all_gather(place, _brought(path, shard))
    _return(out, place)


def all_to_all(group: Group, out: torch.Tensor, x: torch.Tensor, out_counts: Counts, counts: Counts) -> None:
    """Equal parts, or parts of given lengths. Collective over: `group`."""
    path = _path(group)
    if path is None:
        staged.all_to_all(group, out, x, out_counts, counts)
        return
    place, source = _there(path, out), _brought(path, x)
    if counts is None or out_counts is None:
        path.all_to_all(place, source)
    else:
        parts, places = _cut(source, counts), _cut(place, out_counts)
        places[group.rank].copy_(parts[group.rank])
        order = [(group.rank + step) % group.size for step in range(1, group.size)]
        path.exchange(
            [(parts[j], j) for j in order if counts[j]], [(places[j], j) for j in reversed(order) if out_counts[j]]
        )
    _return(out, place)


def gather(group: Group, out: torch.Tensor, shard: torch.Tensor, root: int) -> None:
    """Equal shards in rank order into `out` of `root`. Collective over: `group`."""
    path = _path(group)
    if path is None:
        staged.gather(group, out, shard, root)
        return
    source = _brought(path, shard)
    if group.rank != root:
        path.exchange([(source, root)], [])
        return
    place = _there(path, out)
    rows = place.view(group.size, shard.numel())
    path.exchange([], [(row, rank) for rank, row in enumerate(rows) if rank != root])
    if rows[root].data_ptr() != source.data_ptr():
        rows[root].copy_(source)
    _return(out, place)


def scatter(group: Group, shard: torch.Tensor, full: torch.Tensor, root: int) -> None:
    """Equal parts of `full` of `root`, one for each rank. Collective over: `group`."""
    path = _path(group)
    if path is None:
        staged.scatter(group, shard, full, root)
        return
    place = _there(path, shard)
    if group.rank != root:
        path.exchange([], [(place, root)])
    else:
        rows = _brought(path, full).view(group.size, shard.numel())
        path.exchange([(row, rank) for rank, row in enumerate(rows) if rank != root], [])
        if rows[root].data_ptr() != place.data_ptr():
            place.copy_(rows[root])
    _return(shard, place)


def send(group: Group, x: torch.Tensor, dst: int, tag: int) -> None:
    """One message; without a path, in the pieces that a receiver expects on any device."""
    path = _path_to(group, dst)
    if path is None:
        staged.send(group, x, dst, tag)
    else:
        path.send(x, dst, tag)


def recv(group: Group, x: torch.Tensor, src: int, tag: int) -> None:
    """One message; without a path, in the pieces that a sender makes on any device."""
    path = _path_to(group, src)
    if path is None:
        staged.recv(group, x, src, tag)
    else:
        path.recv(x, src, tag)


def post_send(group: Group, x: torch.Tensor, dst: int, tag: int) -> Posted:
    """One message, not waited for."""
    path = _path_to(group, dst)
    return staged.post_send(group, x, dst, tag) if path is None else path.post_send(x, dst, tag)


def post_recv(group: Group, x: torch.Tensor, src: int, tag: int) -> Posted:
    """One message, not waited for."""
    path = _path_to(group, src)
    return staged.post_recv(group, x, src, tag) if path is None else path.post_recv(x, src, tag)


# -- which way ---------------------------------------------------------------------------------------------------------


def _path(group: Group) -> DevicePath | None:
    """The path, where there is anything to move."""
    return None if group.size == 1 else group.device_path


def _path_to(group: Group, peer: int) -> DevicePath | None:
    """The path, where messages to and from a rank go that way."""
    path = _path(group)
    return path if path is not None and path.reaches(peer) else None


def _path_of_sums(group: Group, x: torch.Tensor, op: str) -> DevicePath | None:
    """The path, unless a device cannot combine such numbers with the bits of the host."""
    is_beyond = x.dtype in WIDE_UNSIGNED or (x.dtype in COMPLEX and op not in ("sum", "avg"))
    return None if is_beyond else _path(group)


def _there(path: DevicePath, x: torch.Tensor) -> torch.Tensor:
    """`x`, or a place of its size on the device."""
    return x if is_on_device(x) else torch.empty(x.shape, dtype=x.dtype, device=path.device)


def _brought(path: DevicePath, x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it on the device."""
    place = _there(path, x)
    if place is not x:
        staged.move(place, x)
    return place


def _return(x: torch.Tensor, place: torch.Tensor) -> None:
    """Fill `x` of the host from its place on the device; complete when this returns."""
    if place is not x:
        staged.move(x, place)


def _cut(x: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    return [x[end - n : end] for n, end in zip(counts, accumulate(counts), strict=True)]


def _multiply(x: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        x.mul_(scale)
