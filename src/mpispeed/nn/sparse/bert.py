"""BERT's self-attention over the blocks of a pattern.

Source: https://www.deepspeed.ai/tutorials/sparse-attention (BertSparseSelfAttention).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpispeed.base.errors import UnfitValue
from mpispeed.nn.sparse.layouts import SparsityConfig
from mpispeed.nn.sparse.self_attention import SparseSelfAttention


class BertSparseSelfAttention(nn.Module):
    """Projections to query, key and value, and sparse attention between them.

    The names of weights are those of transformers' BERT.
    """

    def __init__(
        self, config: Any, sparsity_config: SparsityConfig | None = None, *, max_seq_length: int = 2048
    ) -> None:
        """Make the projections.

        Args:
            config: has `hidden_size` and `num_attention_heads`; an `attention_probs_dropout_prob` has to be 0.
            sparsity_config: the pattern; None: that of the engine's config, else `FixedSparsityConfig`.
            max_seq_length: tokens of the longest sequence.

        Raises:
            UnfitValue: heads do not divide the hidden size, or probabilities would be dropped.
        """
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        if hidden % heads:
            msg = f"hidden_size is {hidden}, no multiple of num_attention_heads, {heads}"
            raise UnfitValue(msg)
        require_no_dropout(config)
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, hidden // heads, hidden
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=max_seq_length)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[B, S, H] as [B, h, S, d]."""
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)

    def attend(self, hidden_states: Tensor, key_mask: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Project and attend.

        Args:
            hidden_states: [B, S, H], S a multiple of the block.
            key_mask: added to the scores of keys, [B, S].
            mask: added to all scores, what broadcasts to [B, h, S, S].

        Returns:
            [B, S, H].
        """
        query, key, value = (
            self.transpose_for_scores(layer(hidden_states)) for layer in (self.query, self.key, self.value)
        )
        out: Tensor = self.sparse_self_attention(query, key, value, rpe=mask, key_padding_mask=key_mask)
        return out.transpose(1, 2).flatten(2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Attend.

        Args:
            hidden_states: [B, S, H], S a multiple of the block.
            attention_mask: added to the scores of keys: 0, or -10000 where a key is padding; [B, S] or [B, 1, 1, S].

        Returns:
            [B, S, H].

        Raises:
            UnfitValue: S is no multiple of the block, or longer than the pattern.
        """
        if attention_mask is not None:
            attention_mask = attention_mask.reshape(len(hidden_states), -1)
        return self.attend(hidden_states, attention_mask)


def require_no_dropout(config: Any) -> None:
    """Refuse models that drop attention probabilities: nothing of them is kept that could be dropped.

    Raises:
        UnfitValue: they do.
    """
    rate = getattr(config, "attention_probs_dropout_prob", 0.0)
    if rate:
        msg = f"attention_probs_dropout_prob is {rate}, and attention over blocks has no dropout; set it to 0"
        raise UnfitValue(msg)


class HubSelfAttention(BertSparseSelfAttention):
    """The same in place of the `BertSelfAttention` or `RobertaSelfAttention` of a model of transformers.

    Sequences may have any length: they are padded to whole blocks, and the padding is not seen.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **others: Any
    ) -> tuple[Tensor, None]:
        """Attend; takes and returns what transformers' layers give and expect.

        Raises:
            UnfitValue: there are keys of earlier calls, or the sequence is longer than the pattern.
        """
        if others.get("past_key_values") is not None:
            msg = "attention over blocks has no cache of keys: call the model with use_cache=False"
            raise UnfitValue(msg)
        length = hidden_states.shape[1]
        missing = -length % self.sparse_self_attention.pattern_for(self.num_attention_heads).block
        keys, pairs = _masks(attention_mask, hidden_states)
        if missing:
            hidden_states = functional.pad(hidden_states, (0, 0, 0, missing))
            keys = hidden_states.new_zeros(len(hidden_states), length, dtype=torch.float32) if keys is None else keys
            keys = functional.pad(keys, (0, missing), value=-torch.inf)
            pairs = None if pairs is None else functional.pad(pairs, (0, missing, 0, missing))
        return self.attend(hidden_states, keys, pairs)[:, :length], None


def _masks(mask: Tensor | None, hidden_states: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Numbers added for keys and for pairs: -inf where the mask is 0, False, or the lowest number of its dtype."""
    if mask is None:
        return None, None
    if mask.dtype.is_floating_point:
        added = mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    else:
        added = torch.zeros(mask.shape, device=mask.device).masked_fill_(mask == 0, -torch.inf)
    if mask.dim() == 2 or mask.shape[-2] == 1:
        return added.reshape(-1, mask.shape[-1]).expand(len(hidden_states), -1), None
    return None, added
