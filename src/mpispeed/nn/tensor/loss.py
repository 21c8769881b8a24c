"""Cross entropy of logits sliced by vocabulary: three numbers per token are exchanged instead of all logits.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor.tensor_cut import vocab_rows

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    comm: Comm,
    vocab_size: int | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits that are sliced by vocabulary over `comm`.

    16-bit logits are computed in fp32, and the loss has their dtype.

    Args:
        logits: this rank's columns, as returned by `VocabLinear` with `gather_output=False`.
        target: classes, equal on all ranks.
        comm: the slicing group.
        vocab_size: classes; columns behind them are padding. None: no padding.
        ignore_index: targets that count neither in the loss nor in the mean.
        label_smoothing: the part of the target that is spread over all classes, 0 to 1.
        reduction: "mean", "sum" or "none".

    Shapes:
        logits: [*target, rows of each rank]
        result: [] or, without reduction, that of target

    Collective over: `comm`, in forward; backward needs no communication.

    Raises:
        UsageError: shapes do not fit, a target is no class, or an option is unknown; alike on all ranks.
    """
    classes = logits.shape[-1] * comm.size if vocab_size is None else vocab_size
    _check(logits, target, comm, classes, (ignore_index, label_smoothing, reduction))
    losses = _CutLoss.apply(logits, target, comm, classes, ignore_index, label_smoothing)
    if reduction == "mean":
        return (losses.sum() / (target != ignore_index).sum()).to(logits.dtype)
    return (losses.sum() if reduction == "sum" else losses).to(logits.dtype)


def _check(
    logits: torch.Tensor, target: torch.Tensor, comm: Comm, classes: int, options: tuple[int, float, str]
) -> None:
    ignore_index, smoothing, reduction = options
    msg = ""
    if reduction not in REDUCTIONS or not 0.0 <= smoothing <= 1.0:
        msg = f"reduction={reduction!r} and label_smoothing={smoothing}; known are {REDUCTIONS} and 0 to 1"
    elif logits.shape[:-1] != target.shape or logits.shape[-1] != vocab_rows(classes, comm.size):
        msg = f"logits of shape {tuple(logits.shape)} are no cut of {classes} classes over {comm.size} ranks for "
        msg += f"targets of shape {tuple(target.shape)}"
    else:
        is_wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if is_wrong.any():
            msg = f"target {target[is_wrong][0].item()} is none of {classes} classes, nor ignore_index={ignore_index}"
    if msg:
        raise UsageError(msg)


class _CutLoss(torch.autograd.Function):
    """Losses of single tokens in fp32 (fp64 for fp64 logits), zero where the target is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        comm: Comm,
        classes: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        rows = logits.shape[-1]
        begin = comm.rank * rows
        real = min(max(classes - begin, 0), rows)
        # the one large copy; it becomes the probabilities that backward needs
        share = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        share[..., real:] = -torch.inf
        highest = share.amax(-1) if rows else share.new_full(target.shape, -torch.inf)
        highest = highest.contiguous()
        comm.all_reduce(highest, "max")
        share -= highest.unsqueeze(-1)
        is_ignored = target == ignore_index
        local = target - begin
        is_other = is_ignored | (local < 0) | (local >= real)
        local = local.masked_fill(is_other, 0)
        sums = share.new_empty((3, *target.shape))
        found = torch.gather(share, -1, local.unsqueeze(-1)).squeeze(-1) if rows else share.new_zeros(target.shape)
        sums[0] = found.masked_fill(is_other, 0.0)
        sums[1] = share[..., :real].sum(-1)
        sums[2] = share.exp_().sum(-1)
        comm.all_reduce(sums)
        log_total = sums[2].log()
        losses = (1.0 - smoothing) * (log_total - sums[0])
        if smoothing:
            losses += smoothing * (log_total - sums[1] / classes)
        share /= sums[2].unsqueeze(-1)
        ctx.save_for_backward(share, local, is_other, is_ignored)
        ctx.smoothing, ctx.classes, ctx.real, ctx.dtype = smoothing, classes, real, logits.dtype
        return losses.masked_fill_(is_ignored, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        share, local, is_other, is_ignored = ctx.saved_tensors
        out = share.clone()
        if ctx.smoothing:
            out[..., : ctx.real] -= ctx.smoothing / ctx.classes
        if out.shape[-1]:
            hit = (ctx.smoothing - 1.0) * (~is_other).to(out.dtype)
            out.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
        out *= grad.masked_fill(is_ignored, 0.0).unsqueeze(-1)
        return out.to(ctx.dtype), None, None, None, None, None
