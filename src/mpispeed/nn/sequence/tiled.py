"""Layers and losses over pieces of a sequence, one after the other, so that only one piece has large intermediates.

Backward runs each piece again. Pieces are counted, not measured: where parameters are gathered for each call, all ranks
have to call equally often, and a rank may have fewer tokens than another, or none.

Source: Bekman et al., "Arctic Long Sequence Training", arXiv 2506.13996, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils import checkpoint

from mpispeed.base.errors import UsageError
from mpispeed.base.even_split import share
from mpispeed.nn.sequence.loss import IGNORED, mean, ranks_of

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


def tiled_mlp(
    mlp: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tiles: int, *, dim: int = -2
) -> torch.Tensor:
    """`mlp(x)`, computed for `tiles` pieces of `x` along `dim`, for functions that treat each token by itself.

    Forward keeps `x` and the output; what a piece needs besides is there for one piece at a time, in backward too.
    Sums of gradients over tokens are in another order than those of one call.

    Args:
        mlp: a module or function of one tensor; it runs `tiles` times in forward, and again in backward.
        x: the input.
        tiles: pieces, at least 1, the same number on all ranks. Sizes differ by at most one token; some may be empty.
        dim: the dim of the tokens.

    Shapes:
        x: [batch, tokens, width] or [tokens, width] with the default `dim`
        result: as `mlp` gives it, joined along `dim`

    Raises:
        UsageError: `tiles` is below 1.
    """
    return torch.cat([_again(mlp, piece) for piece in x.split(_sizes(x.shape[dim], tiles), dim)], dim)


def tiled_loss(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    tiles: int,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    comm: Comm | None = None,
) -> torch.Tensor:
    """`sequence.cross_entropy(head(hidden), labels)`, of which logits are there for one piece of the tokens at a time.

    Args:
        head: the last layer, from hidden states to logits; it runs `tiles` times in forward, and again in backward.
        hidden: this rank's hidden states.
        labels: the class of each token; those of a language model are shifted by one before the sequence is cut.
        tiles: pieces, at least 1, the same number on all ranks.
        ignore_index: labels that count neither in the loss nor in the mean.
        label_smoothing: the part of the target that is spread over all classes, 0 to 1.
        comm: the ranks of the sequence; None: those of the pass that runs.

    Shapes:
        hidden: [*labels, width]
        labels: [batch, tokens], or any other
        result: [], in fp32 or wider

    Collective over: the sequence, in forward.

    Raises:
        UsageError: `tiles` is below 1, or shapes do not fit.
    """
    if hidden.shape[:-1] != labels.shape:
        msg = f"tiled_loss: hidden states of shape {tuple(hidden.shape)} do not fit labels of {tuple(labels.shape)}"
        raise UsageError(msg)

    def loss(piece: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = head(piece)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(
            logits, target, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )

    targets = labels.flatten()
    sizes = _sizes(targets.shape[0], tiles)
    pieces = zip(hidden.flatten(0, -2).split(sizes), targets.split(sizes), strict=True)
    losses = torch.stack([_again(loss, *piece) for piece in pieces])
    return mean(losses.sum(), (targets != ignore_index).sum(), ranks_of(comm, hidden, labels))


def _again(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """`function(*args)`, which backward runs again."""
    if not torch.is_grad_enabled():
        return function(*args)
    found: Any = checkpoint.checkpoint(function, *args, use_reentrant=False)
    return found


def _sizes(length: int, tiles: int) -> list[int]:
    if tiles < 1:
        msg = f"tiles={tiles}: a sequence is computed in 1 piece at least; more pieces need less memory"
        raise UsageError(msg)
    return [stop - start for start, stop in (share(length, tile, tiles) for tile in range(tiles))]
