"""Losses of a sequence that is cut over ranks: means over all of its tokens, whichever ranks have them.

A rank with more padding or a longer prompt has fewer tokens that count, so the mean of the ranks' means would be
another loss. Here every rank gets the mean over the sequence, and a gradient that is right where gradients are averaged
over all ranks, those of one sequence too: that of its own tokens times the number of these ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from mpispeed.base.errors import UsageError
from mpispeed.nn.sequence import running
from mpispeed.nn.sequence.handed import handed
from mpispeed.nn.sequence.parts import gathered

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

IGNORED = -100
"""The label that counts in no loss, as in torch."""


def mean(total: torch.Tensor, count: torch.Tensor | float, comm: Comm | None = None) -> torch.Tensor:
    """The sum of `total` over the ranks of a sequence, by the sum of `count`; the same on all of them.

    Args:
        total: the sum of the losses of this rank's tokens; 0 with a graph where it has none.
        count: the number of tokens of this rank that count, or their weight.
        comm: the ranks of the sequence; None: those of the pass that runs, and this rank alone if it is not cut.

    Shapes:
        total, count, result: []

    Collective over: the sequence, in forward; backward needs no communication.
    """
    return _mean.run(total, count, comm)


@running.Eager
def _mean(total: torch.Tensor, count: torch.Tensor | float, comm: Comm | None) -> torch.Tensor:
    comm = ranks_of(comm)
    wide = torch.promote_types(total.dtype, torch.float32)
    if comm is None or comm.size == 1:
        return total.to(wide) / count
    found: torch.Tensor = _Mean.apply(total.to(wide), torch.as_tensor(count, device=total.device), comm)
    return found


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    comm: Comm | None = None,
) -> torch.Tensor:
    """The mean cross entropy of all tokens of a sequence; the same on all of its ranks.

    Args:
        logits: of this rank's tokens.
        labels: their classes; those of a language model are shifted by one before the sequence is cut.
        ignore_index: labels that count neither in the loss nor in the mean.
        label_smoothing: the part of the target that is spread over all classes, 0 to 1.
        comm: the ranks of the sequence; None: those of the pass that runs or of the loader's batch that `logits` or
            `labels` are of, and this rank alone if neither is cut.

    Shapes:
        logits: [*labels, classes]
        labels: [batch, tokens], or any other
        result: [], in fp32 or wider

    Collective over: the sequence, in forward; backward needs no communication.

    Raises:
        UsageError: shapes do not fit.
    """
    if logits.shape[:-1] != labels.shape:
        msg = f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}"
        raise UsageError(msg)
    flat = logits.flatten(0, -2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    total = F.cross_entropy(
        flat, labels.flatten(), reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return mean(total, (labels != ignore_index).sum(), ranks_of(comm, logits, labels))


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, sp_group: Comm | None
) -> torch.Tensor:
    """The losses of all tokens of a sequence, from each rank's logits of its own; the same on all ranks.

    Every rank is taken to compute the same loss of them, and gradients to be averaged over ranks.

    Args:
        vocab_parallel_logits: this rank's tokens, with all classes. Numbers of tokens may differ between ranks.
        target: their classes.
        sp_group: the ranks of the sequence, in the order of their tokens.

    Shapes:
        vocab_parallel_logits: [tokens of this rank, batch, classes]
        target: [tokens of this rank, batch]
        result: [tokens of all ranks, batch], in fp32 or wider

    Source: DeepSpeed's function of this name (`deepspeed.sequence.cross_entropy`).

    Collective over: the sequence, in forward and in backward.

    Raises:
        UsageError: shapes do not fit.
    """
    logits = vocab_parallel_logits
    if logits.shape[:-1] != target.shape:
        msg = f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(target.shape)}"
        raise UsageError(msg)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    comm = ranks_of(sp_group)
    if comm is None or comm.size == 1:
        return losses
    counts: list[int] = comm.gather_objects(losses.shape[0])
    return torch.cat(gathered(losses, comm, counts, 0))


def ranks_of(comm: Comm | None, *tensors: torch.Tensor) -> Comm | None:
    """The ranks of a sequence: `comm`, or those of the pass that runs; else of the batch `tensors` come from. Local.

    A batch that its loader has cut is known by its own tensors and the outputs of its pass, also after the pass.
    """
    if comm is not None:
        return comm
    found = running.current() or handed(tensors)
    return None if found is None or found.group is None else found.group.comm


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, comm: Comm) -> torch.Tensor:
        # fp64, in which counts of tokens are exact
        sums = torch.stack([total.double(), count.double()])
        comm.all_reduce(sums)
        ctx.factor = (comm.size / sums[1]).to(total.dtype)
        return (sums[0] / sums[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad * ctx.factor, None, None
