"""`deepspeed.sequence.layer`: any attention of whole sequences, given all tokens of a part of the heads.

Source: DeepSpeed's tutorial "Getting Started with DeepSpeed-Ulysses"; Jacobs et al., arXiv 2309.14509. Heads and
lengths need not divide by the ranks here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.compat.comm_groups import group_of
from mpispeed.nn.sequence.ulysses import Trade, to_heads, to_tokens


class DistributedAttention(nn.Module):
    """Attention over ranks that each have a part of a sequence, by an attention that knows nothing of it.

    Shapes:
        inputs: queries [s, b, h, d], keys and values [s, b, h_kv, d] of this rank's s tokens, or [b, s, ...] with
            `gather_idx` 1
        given to `local_attention`: all tokens, and this rank's heads; heads of keys are repeated where needed
        output: as `local_attention` returns it, [s, b, h, d] or [s, b, h * d], of this rank's tokens and all heads
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        """Around `local_attention`.

        Args:
            local_attention: called with queries, keys, values and all that `forward` gets beside them.
            sequence_process_group: ranks that share sequences, in the order of their parts.
            scatter_idx: dim of the heads.
            gather_idx: dim of the tokens.
            sp_stream: has no effect.

        Raises:
            UsageError: heads and tokens are not where tensors of attention have them.
        """
        super().__init__()
        self.local_attn, self.spg, self.sp_stream = local_attention, sequence_process_group, sp_stream
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        if scatter_idx != 2 or gather_idx not in (0, 1):
            msg = f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: heads are dim 2, tokens dim 0 or 1"
            raise UsageError(msg)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Output for this rank's tokens; a first further argument that is a number is the dim of the batch.

        Collective over: the group, in backward too.

        Raises:
            UsageError: tensors are not of four dims.
        """
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = args[1:]  # newer scripts say where the batch is; it is where the tokens are not
        kwargs.pop("batch_dim_idx", None)
        if any(x.dim() != 4 for x in (query, key, value)):
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            msg = f"DistributedAttention takes tensors of four dims, tokens, batch, heads and width, not {shapes}"
            raise UsageError(msg)
        comm = group_of(self.spg)
        counts = tuple(comm.gather_objects(query.shape[self.gather_idx]))
        trade = Trade(comm, counts, query.shape[2], key.shape[2])
        mine = to_heads(self._inner(query), self._inner(key), self._inner(value), trade)
        if mine[0].shape[1]:
            out = self.local_attn(*(self._outer(x) for x in mine), *args, **kwargs)
        else:  # fewer heads than ranks: the others have them, and backward still has to meet
            out = self._outer(mine[0] + (mine[1].sum() + mine[2].sum()))
        is_flat = comm.gather_objects(out.dim() == 3)[0]
        if out.dim() == 3:
            out = out.unflatten(2, (mine[0].shape[1], -1))
        found = self._outer(to_tokens(self._inner(out), trade))
        return found.flatten(2) if is_flat else found

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, width]."""
        return x.permute(1, 2, 0, 3) if self.gather_idx == 0 else x.transpose(1, 2)

    def _outer(self, x: torch.Tensor) -> torch.Tensor:
        """As the script has it."""
        return x.permute(2, 0, 1, 3) if self.gather_idx == 0 else x.transpose(1, 2)
