"""This rank's tokens and those of the whole sequence, in the pass that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.sequence import running


def positions(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Where each token of this rank is in the whole sequence; for rotations, tables of positions, and masks.

    Args:
        x: tokens of this rank, or what layers made of them.
        dim: the dim of the tokens.

    Shapes:
        result: [tokens of this rank], int64, on the device of `x`

    Raises:
        UsageError: `x` has another number of tokens than this rank.
    """
    return _positions.run(x, dim)


@running.Eager
def _positions(x: torch.Tensor, dim: int) -> torch.Tensor:
    current = running.current()
    if current is None:
        return torch.arange(x.shape[dim], device=x.device)
    _check(x, dim, current)
    return current.layout.positions(current.rank, x.device)


def cut(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have whole; `x` itself if the sequence is not cut.

    Raises:
        UsageError: `x` has another length than the sequence.
    """
    return _cut.run(x, dim)


@running.Eager
def _cut(x: torch.Tensor, dim: int) -> torch.Tensor:
    current = running.current()
    return x if current is None else current.layout.cut(x, current.rank, dim)


def join(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The whole sequence of which each rank has a part, on all of them, in its order.

    Its gradient is the sum over ranks, each of which is taken to compute the same loss: right where gradients are
    averaged over ranks.

    Collective over: the sequence, in forward and in backward.

    Raises:
        UsageError: `x` has another number of tokens than this rank.
    """
    return _join.run(x, dim)


@running.Eager
def _join(x: torch.Tensor, dim: int) -> torch.Tensor:
    current = running.current()
    if current is None or current.group is None or current.group.size == 1:
        return x
    _check(x, dim, current)
    layout = current.layout
    counts = [layout.count(rank) for rank in range(layout.size)]
    return layout.join(gathered(x, current.group.comm, counts, dim), dim)


def gathered(x: torch.Tensor, comm: Comm, counts: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    """The parts of all ranks, of so many tokens along `dim`; the gradient is the sum over ranks.

    Collective over: `comm`, in forward and in backward.
    """
    found: tuple[torch.Tensor, ...] = _Gather.apply(x, comm, tuple(counts), dim % x.dim())
    return found


def _check(x: torch.Tensor, dim: int, current: running.Running) -> None:
    count = current.layout.count(current.rank)
    if x.shape[dim] != count:
        msg = (
            f"dim {dim} of a tensor of shape {tuple(x.shape)} are not this rank's {count} of {current.layout.length} "
            "tokens; pass what is cut, and say which dim tokens are along"
        )
        raise UsageError(msg)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, counts: tuple[int, ...], dim: int) -> tuple[torch.Tensor, ...]:
        ctx.comm, ctx.counts, ctx.dim = comm, counts, dim
        part = x.new_zeros((*x.shape[:dim], max(counts), *x.shape[dim + 1 :]))
        part.narrow(dim, 0, x.shape[dim]).copy_(x)
        out = part.new_empty((comm.size, *part.shape))
        comm.all_gather(out, part)
        return tuple(one.narrow(dim, 0, count).clone() for one, count in zip(out, counts, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        whole = torch.cat(grads, ctx.dim).contiguous()
        ctx.comm.all_reduce(whole)
        return whole.split(ctx.counts, ctx.dim)[ctx.comm.rank].contiguous(), None, None, None
