"""Borders between replicated and sliced activations of a slicing group, as autograd functions.

Each border is one verb in forward and its counterpart in backward, so that gradients are those of the unsplit model:

| border | forward | backward |
|---|---|---|
| `copy_to` | nothing | sum |
| `reduce_from` | sum | nothing |
| `scatter_to` | own part | gather |
| `gather_from` | gather | own part |
| `gather_sequence` | gather | sum, own part |
| `reduce_scatter_sequence` | sum, own part | gather |

Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4.2.2.

Parts are those of `share` along one dim; `length` is the full length, and without it all parts are equal.
All ranks of the group call alike, in recomputed passes too. Backwards are made of the same borders, so gradients of
gradients are right.
"""

from __future__ import annotations

from typing import Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.base.even_split import share
from mpispeed.mesh.comm import Comm


def copy_to(x: torch.Tensor, comm: Comm) -> torch.Tensor:
    """`x`, whose gradients the ranks add up. Collective over: `comm`, in backward."""
    return _Copy.apply(x, comm) if _is_recorded(comm) else x


def reduce_from(x: torch.Tensor, comm: Comm, *, is_own: bool = False) -> torch.Tensor:
    """The sum of all ranks' `x`. Collective over: `comm`.

    Args:
        x: this rank's part of the sum.
        comm: the slicing group.
        is_own: nobody else reads `x`, so the sum may overwrite it.
    """
    if _is_recorded(comm):
        return _Reduce.apply(x, comm, is_own)
    return x if comm.size == 1 else _summed_in(x, comm, is_own)


def scatter_to(x: torch.Tensor, comm: Comm, dim: int = -1) -> torch.Tensor:
    """This rank's part of `x` along `dim`; `x` is equal on all ranks. Collective over: `comm`, in backward."""
    if _is_recorded(comm):
        return _Scatter.apply(x, comm, dim % x.dim())
    return x if comm.size == 1 else _own(x, comm, dim)


def gather_from(x: torch.Tensor, comm: Comm, dim: int = -1, length: int | None = None) -> torch.Tensor:
    """All ranks' parts along `dim`, for replicated computation afterwards. Collective over: `comm`."""
    return _gather(x, comm, dim, length, is_summed=False)


def gather_sequence(x: torch.Tensor, comm: Comm, dim: int = 1, length: int | None = None) -> torch.Tensor:
    """All ranks' parts along `dim`, for sliced computation afterwards. Collective over: `comm`."""
    return _gather(x, comm, dim, length, is_summed=True)


def reduce_scatter_sequence(x: torch.Tensor, comm: Comm, dim: int = 1) -> torch.Tensor:
    """This rank's part along `dim` of the sum of all ranks' `x`. Collective over: `comm`."""
    if _is_recorded(comm):
        return _ReduceScatter.apply(x, comm, dim % x.dim())
    return x if comm.size == 1 else reduce_scattered(x, comm, dim % x.dim())


def check_divisible(length: int, comm: Comm, what: str) -> None:
    """Refuse a length that does not divide into equal parts; equal on all ranks, because the length is.

    Raises:
        UsageError: names the length and the number of ranks.
    """
    if length % comm.size:
        msg = f"{what} of length {length} cannot be cut into {comm.size} equal parts; pad it to a multiple of "
        msg += f"{comm.size}, or train without sequence parallelism"
        raise UsageError(msg)


def _is_recorded(comm: Comm) -> bool:
    """True if a border has a backward; without gradients its verb is called, as a function of autograd costs more."""
    return comm.size > 1 and torch.is_grad_enabled()


def _gather(x: torch.Tensor, comm: Comm, dim: int, length: int | None, *, is_summed: bool) -> torch.Tensor:
    if comm.size == 1:
        return x
    whole = _whole(x, comm, dim, length)
    if _is_recorded(comm):
        return _Gather.apply(x, comm, dim % x.dim(), whole, is_summed)
    return gathered(x, comm, dim % x.dim(), whole)


def _summed_in(x: torch.Tensor, comm: Comm, is_own: bool) -> torch.Tensor:
    """The sum of all ranks' `x`, in place if nobody else reads it; no autograd. Collective over: `comm`."""
    if not is_own or not x.is_contiguous():
        return summed(x, comm)
    comm.all_reduce(x)
    return x


def summed(x: torch.Tensor, comm: Comm) -> torch.Tensor:
    """A new tensor, the sum of all ranks' `x`; no autograd. Collective over: `comm`."""
    out = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(out)
    return out


def gathered(x: torch.Tensor, comm: Comm, dim: int, length: int) -> torch.Tensor:
    """The parts of all ranks along `dim`, joined; no autograd. Collective over: `comm`.

    Shapes: x is this rank's `share` of `length` along `dim`; the result has `length` there.
    """
    most = -(-length // comm.size)
    part = x.contiguous()
    if part.shape[dim] != most:
        padded = part.new_zeros((*part.shape[:dim], most, *part.shape[dim + 1 :]))
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        part = padded
    out = part.new_empty((comm.size, *part.shape))
    comm.all_gather(out, part)
    if length % comm.size == 0:
        return out.movedim(0, dim).reshape((*part.shape[:dim], length, *part.shape[dim + 1 :]))
    counts = (stop - start for start, stop in (share(length, rank, comm.size) for rank in range(comm.size)))
    return torch.cat([one.narrow(dim, 0, count) for one, count in zip(out, counts, strict=True)], dim)


def reduce_scattered(x: torch.Tensor, comm: Comm, dim: int) -> torch.Tensor:
    """This rank's `share` along `dim` of the sum of all ranks' `x`; no autograd. Collective over: `comm`."""
    length = x.shape[dim]
    most = -(-length // comm.size)
    parts = x.new_zeros((comm.size, *x.shape[:dim], most, *x.shape[dim + 1 :]))
    for rank in range(comm.size):
        start, stop = share(length, rank, comm.size)
        parts[rank].narrow(dim, 0, stop - start).copy_(x.narrow(dim, start, stop - start))
    out = x.new_empty(parts.shape[1:])
    comm.reduce_scatter(out, parts)
    start, stop = share(length, comm.rank, comm.size)
    return out if stop - start == most else out.narrow(dim, 0, stop - start).contiguous()


def _whole(x: torch.Tensor, comm: Comm, dim: int, length: int | None) -> int:
    """The length of all parts together; a part that does not fit it is refused."""
    own = x.shape[dim]
    if length is None:
        return own * comm.size
    start, stop = share(length, comm.rank, comm.size)
    if own != stop - start:
        msg = f"rank {comm.rank} of {comm.size} has {own} of {length} along dim {dim}; its part has {stop - start}"
        raise UsageError(msg)
    return length


def _own(x: torch.Tensor, comm: Comm, dim: int) -> torch.Tensor:
    start, stop = share(x.shape[dim], comm.rank, comm.size)
    return x.narrow(dim, start, stop - start).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Reduce.apply(grad, ctx.comm, False), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, is_own: bool) -> torch.Tensor:
        ctx.comm = comm
        if is_own and x.is_contiguous():
            ctx.mark_dirty(x)
        return _summed_in(x, comm, is_own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Copy.apply(grad, ctx.comm), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, dim: int) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.length = comm, dim, x.shape[dim]
        return _own(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Gather.apply(grad, ctx.comm, ctx.dim, ctx.length, False), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, dim: int, length: int, is_summed: bool) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.is_summed = comm, dim, is_summed
        return gathered(x, comm, dim, length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        back = _ReduceScatter if ctx.is_summed else _Scatter
        return back.apply(grad, ctx.comm, ctx.dim), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, dim: int) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.length = comm, dim, x.shape[dim]
        return reduce_scattered(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Gather.apply(grad, ctx.comm, ctx.dim, ctx.length, True), None, None
