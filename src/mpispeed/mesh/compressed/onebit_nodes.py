"""The 1-bit mean over nodes of several ranks: full precision inside a node, one bit per element between nodes.

Each rank of a node takes an equal shard of the buffer, sums it over the node through shared memory, and exchanges it
with the ranks that have the same shard on other nodes; so a node sends as much as one rank would. Each shard
has scales of its own. The ranks are a grid: `inner` are those of one node, `outer` those at one place of every node.

Source: 1-bit Adam (arXiv 2102.02888), the compressed all-reduce, here between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.base.device import HOST
from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.verbs import flat_view
from mpispeed.mesh.compressed.onebit import (
    OneBitErrors,
    compressed_all_reduce,
    exchange,
    padded_length,
    require_float,
    require_together,
)
from mpispeed.native.one_bit import compensate

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


def shard_length(count: int, inner: int, outer: int) -> int:
    """Elements of a rank's shard of a buffer of `count`, for `inner` ranks per node and `outer` nodes.

    A buffer of `inner` times as many needs no padding, and its exchange no copies.
    """
    return padded_length(count, inner * outer) // inner


def zero_errors(count: int, inner: int, outer: int, device: torch.device = HOST) -> OneBitErrors:
    """Initial errors of a rank's shard for a buffer of `count` elements on `device`.

    Shapes: worker [shard_length], server [shard_length / outer].
    """
    return OneBitErrors.zeros(shard_length(count, inner, outer), outer, device)


def compressed_all_reduce_through(
    inner: Comm, outer: Comm, x: torch.Tensor, errors: OneBitErrors, *, overlapped: bool | None = None
) -> None:
    """Replace `x` by its approximate mean over both groups, bitwise equal on all ranks.

    With one rank in `inner` it equals `compressed_all_reduce` over `outer` bitwise.

    Collective over: `inner` and `outer`.
    Shapes: x [count] in fp32, bf16 or fp16; errors as from `zero_errors`.

    Raises:
        CommError: the dtype, or `errors` is of another length.
    """
    flat = flat_view(outer.group, x, "compressed_all_reduce_through")
    require_float(outer, flat)
    _require_fitting(inner, outer, flat.numel(), errors)
    require_together(outer, errors, flat.device)
    if inner.size == 1:
        compressed_all_reduce(outer, flat, errors, overlapped=overlapped)
        return
    shard = mean_inside(inner, outer, flat)
    squares = compensate(errors.worker, shard, threads=inner.group.threads)
    exchange_through(inner, outer, flat, errors, squares, overlapped=overlapped)


def mean_inside(inner: Comm, outer: Comm, x: torch.Tensor) -> torch.Tensor:
    """The mean of this rank's shard of `x` over the node; a scratch buffer that the next call overwrites.

    Collective over: `inner`.
    Shapes: x [count], in fp32, bf16 or fp16; the result [shard_length], in fp32, with zeros for padding.
    """
    flat = flat_view(inner.group, x, "mean_inside")
    length = shard_length(flat.numel(), inner.size, outer.size)
    whole = _whole(inner, flat, length)
    if whole is not flat:
        whole[: flat.numel()].copy_(flat)
        whole[flat.numel() :].zero_()
    shard = _room(inner, "node mean", length, torch.float32, flat.device)
    inner.reduce_scatter(shard, whole, "avg")
    return shard


def exchange_through(
    inner: Comm, outer: Comm, out: torch.Tensor, errors: OneBitErrors, squares: Sequence[float],
    *, overlapped: bool | None = None,
) -> None:  # fmt: skip
    """`compressed_all_reduce_through` of shards that `compensate` has added to the errors of the worker already.

    Collective over: `inner` and `outer`.
    Shapes: out [count], in fp32, bf16 or fp16; `squares` are of all of errors.worker, padding included.

    Raises:
        CommError: `errors` is of another length.
    """
    flat = flat_view(outer.group, out, "exchange_through")
    _require_fitting(inner, outer, flat.numel(), errors)
    require_together(outer, errors, flat.device)
    length = errors.worker.numel()
    whole = _whole(inner, flat, length)
    own = whole[inner.rank * length : (inner.rank + 1) * length]
    exchange(outer, own, errors, squares, overlapped=overlapped)
    inner.all_gather(whole, own)
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])


def _whole(inner: Comm, flat: torch.Tensor, length: int) -> torch.Tensor:
    """`flat` itself if it is as long as all shards of the node, else scratch of that length."""
    if flat.numel() == inner.size * length:
        return flat
    return _room(inner, "node values", inner.size * length, flat.dtype, flat.device)


def _room(comm: Comm, name: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer: scratch of the group, or a new one on a device, whose allocator reuses memory in stream order."""
    if device == HOST:
        return comm.group.scratch(name, count, dtype)
    return torch.empty(count, dtype=dtype, device=device)


def _require_fitting(inner: Comm, outer: Comm, count: int, errors: OneBitErrors) -> None:
    length = shard_length(count, inner.size, outer.size)
    if errors.worker.numel() != length or errors.server.numel() != length // outer.size:
        msg = (
            f"one-bit mean inside {inner} and between {outer}: errors of {errors.worker.numel()} and "
            f"{errors.server.numel()} elements for {count} elements; make them with "
            f"zero_errors({count}, {inner.size}, {outer.size})"
        )
        raise CommError(msg)
