"""`torch.nn.SyncBatchNorm` over a group of this library: torch's own needs its process group, and a GPU.

Source: the backward pass of Ioffe and Szegedy, arXiv 1502.03167, with sums over all samples of the group; means and
variances of ranks are joined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from mpispeed.mesh.comm import Comm

_GROUP = "_mpispeed_group"


class _Shared:
    """Holder of a group, shared by copies of a model."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class SyncedNorm(nn.SyncBatchNorm):
    """The class of a `SyncBatchNorm` while an engine has it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise by mean and variance over the samples of all ranks, when training.

        Collective over: the group, when training; the same in backward.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        comm: Comm = self.__dict__[_GROUP].comm
        out, mean, var, count = _Normalise.apply(input, self.weight, self.bias, self.eps, comm)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(mean, var, float(count))
        return out

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: float) -> None:
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if factor is None else factor
        for running, new in ((self.running_mean, mean), (self.running_var, var * (count / max(count - 1, 1)))):
            if running is not None and factor is not None:
                running.mul_(1 - factor).add_((new * factor).to(running.dtype))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, comm: Comm
    ) -> tuple[torch.Tensor, ...]:
        mean, var, count = _moments(x, comm)
        means, inverse = mean.to(_dtype(x)), torch.rsqrt(var + eps).to(_dtype(x))
        ctx.save_for_backward(x, weight, means, inverse)
        ctx.count, ctx.comm = count, comm
        scale = inverse if weight is None else inverse * weight
        out = (x - _wide(means, x)) * _wide(scale, x)
        out = out if bias is None else out + _wide(bias, x)
        ctx.mark_non_differentiable(mean, var, count)
        return out.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable  # sums over ranks are not seen by autograd
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        dims, centred = _dims(x), x - _wide(mean, x)
        sums = torch.stack([part.sum(dims, dtype=_dtype(x)) for part in (grad, grad * centred)])
        by_weight = sums[1] * inverse if ctx.needs_input_grad[1] else None
        by_bias = sums[0].clone() if ctx.needs_input_grad[2] else None
        by_x = None
        if ctx.needs_input_grad[0]:
            total = sums.double()
            ctx.comm.all_reduce(total)
            total = (total / ctx.count).to(_dtype(x))
            scale = inverse if weight is None else inverse * weight
            by_x = (grad - _wide(total[0], x) - centred * _wide(total[1] * inverse.square(), x)) * _wide(scale, x)
        return by_x, by_weight, by_bias, None, None  # torch casts them


def _moments(x: torch.Tensor, comm: Comm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, variance and number of samples over all ranks, in doubles. Collective over: the group."""
    channels, count = x.shape[1], x.numel() // x.shape[1]
    own = torch.zeros(2, channels, dtype=torch.float64, device=x.device)
    if count:
        var, mean = torch.var_mean(x.to(_dtype(x)), _dims(x), correction=0)
        own[0], own[1] = mean, var
    row = torch.cat([own.view(-1), own.new_tensor([count])])
    rows = row.new_empty(comm.size * row.numel())
    comm.all_gather(rows, row)
    table = rows.view(comm.size, -1)
    counts, means, variances = table[:, -1:], table[:, :channels], table[:, channels:-1]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean, var, total


def _dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _dims(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value per channel, broadcastable to `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def synchronise_norms(model: nn.Module, comm: Comm) -> str:
    """Make every SyncBatchNorm of a model work over `comm`, except those with a process group of torch. Local.

    Returns:
        A sentence if there is a derived class, whose forward would call torch's, which does not synchronise; else "".
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm) or module.process_group is not None or comm.size == 1:
            continue
        if type(module) not in (nn.SyncBatchNorm, SyncedNorm):
            return (
                f"{path} is a {type(module).__name__}, a class derived from SyncBatchNorm: only torch.nn.SyncBatchNorm "
                "itself is synchronised; use it, or give the layer a process_group of torch.distributed"
            )
        module.__class__ = SyncedNorm
        module.__dict__[_GROUP] = _Shared(comm)
    return ""


def release_norms(model: nn.Module) -> None:
    """Give every SyncBatchNorm its own class back. Local."""
    for module in model.modules():
        if module.__dict__.pop(_GROUP, None) is not None:
            module.__class__ = nn.SyncBatchNorm
