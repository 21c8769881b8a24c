"""Sparse attention in models of transformers: longer tables of positions, other layers, padded inputs.

Source: https://www.deepspeed.ai/tutorials/sparse-attention (SparseAttentionUtils). transformers is imported when
a model of it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpispeed.base.errors import UnfitValue, UnimplementedUse
from mpispeed.nn.sparse.bert import BertSparseSelfAttention, HubSelfAttention, require_no_dropout
from mpispeed.nn.sparse.layouts import SparsityConfig

RESERVED = {"bert": 0, "roberta": 2}
"""Kinds of models -> rows of the table of positions that are no positions."""

NAME = "mpispeed_sparse"
"""What transformers knows the attention by; its mask is that of keys, [B, S]."""


def encoder_of(model: Any) -> tuple[str, Any] | None:
    """The kind of a BERT or RoBERTa of transformers, and its part with embeddings and layers; None for others."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in RESERVED:
        return None
    inner = getattr(model, kind, model)
    return (kind, inner) if hasattr(inner, "encoder") and hasattr(inner, "embeddings") else None


def _require_encoder(model: Any) -> tuple[str, Any]:
    found = encoder_of(model)
    if found is None:
        msg = f"the model is a {type(model).__name__}; this is for BERT and RoBERTa of transformers"
        raise UnfitValue(msg)
    return found


def _forbid(*_: Any, **__: Any) -> None:
    msg = "a layer beside self-attention, as cross-attention, cannot attend over blocks; give models without it"
    raise UnimplementedUse(msg)


def _keys_mask(*_: Any, kv_length: int, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """What layers get as their mask: that of keys, [B, S], or None without padding."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, -kv_length:]


class SparseAttentionUtils:
    """Functions for scripts; all are static."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Let a model take longer sequences: its table of positions is repeated.

        Args:
            model: a BERT or RoBERTa of transformers; changed in place, and returned.
            max_position: tokens of the longest sequence; more than now.

        Raises:
            UnfitValue: another model, or no more positions than now.
        """
        kind, inner = _require_encoder(model)
        reserved, embeddings = RESERVED[kind], inner.embeddings
        table = embeddings.position_embeddings.weight.detach()
        body = table[reserved:]
        if max_position <= len(body):
            msg = f"max_position is {max_position}, and the model has {len(body)} positions already; give more"
            raise UnfitValue(msg)
        longer = body.repeat(-(-max_position // len(body)), 1)[:max_position]
        old, size = embeddings.position_embeddings, max_position + reserved
        new = nn.Embedding(size, old.embedding_dim, old.padding_idx, device=table.device, dtype=table.dtype)
        new.weight = nn.Parameter(torch.cat([table[:reserved], longer]), requires_grad=old.weight.requires_grad)
        embeddings.position_embeddings = new
        numbers = torch.arange(size, device=table.device).expand(1, -1)
        for name, values in (("position_ids", numbers), ("token_type_ids", torch.zeros_like(numbers))):
            if getattr(embeddings, name, None) is not None:
                embeddings.register_buffer(name, values, persistent=False)
        model.config.max_position_embeddings = size
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Let a tokenizer make sequences of up to this many tokens; changed in place, and returned."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """Let all layers of a model attend over the blocks of a pattern, with the weights they have.

        Args:
            model: a BERT or RoBERTa of transformers; changed in place, and returned. Its config becomes its own:
                others made from the same one stay as they are.
            max_position: tokens of the longest sequence; `extend_position_embedding` makes room for more.
            sparsity_config: the pattern; None: `FixedSparsityConfig`.

        Raises:
            UnfitValue: another model, a decoder, one with fewer positions, or one that drops attention probabilities.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        kind, inner = _require_encoder(model)
        if model.config.is_decoder:
            msg = "the model is a decoder (config.is_decoder); sparse attention replaces that of encoders"
            raise UnfitValue(msg)
        require_no_dropout(model.config)
        AttentionInterface.register(NAME, _forbid)
        AttentionMaskInterface.register(NAME, _keys_mask)
        found = inner.embeddings.position_embeddings.num_embeddings - RESERVED[kind]
        if found < max_position:
            msg = f"max_position is {max_position}, and the model has {found} positions; call "
            msg += "SparseAttentionUtils.extend_position_embedding(model, max_position) before"
            raise UnfitValue(msg)
        _own_config(model)
        _replace(model.config, inner.encoder.layer, sparsity_config, max_position, HubSelfAttention)
        inner.set_attn_implementation(NAME)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[nn.Module]:
        """Put sparse attention into layers of transformers' BERT or RoBERTa, with the weights they have.

        Args:
            config: that of the model.
            layers: with `attention.self`; changed in place, and returned.
            sparsity_config: the pattern; None: `FixedSparsityConfig`.

        Raises:
            UnfitValue: heads do not divide the hidden size, or probabilities would be dropped.
        """
        length = config.max_position_embeddings - RESERVED.get(config.model_type, 0)
        return _replace(config, layers, sparsity_config, length, HubSelfAttention)

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad inputs, [B, S] or for `inputs_embeds` [B, S, H], to whole blocks; None stays None.

        Args:
            block_size: tokens of a block.
            input_ids: padded with `pad_token_id`.
            attention_mask: padded with 0 or False.
            token_type_ids: padded with 0.
            position_ids: padded with `pad_token_id`.
            inputs_embeds: padded with the embedding of `pad_token_id`.
            pad_token_id: the token of padding.
            model_embeddings: called with ids [B, n], returns [B, n, H]; needed for `inputs_embeds` only.

        Returns:
            Tokens of padding for each sequence, and the five tensors.

        Raises:
            UnfitValue: neither ids nor embeddings are given, or blocks have no tokens.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            msg = "input_ids and inputs_embeds are both None; give one of them, which tells the length"
            raise UnfitValue(msg)
        if block_size < 1:
            msg = f"block_size is {block_size}; give the tokens of a block, at least 1"
            raise UnfitValue(msg)
        count = -given.shape[1] % block_size
        if count == 0:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            ids = torch.full((len(inputs_embeds), count), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], dim=1)
        return (
            count,
            _padded(input_ids, count, pad_token_id),
            _padded(attention_mask, count, 0),
            _padded(token_type_ids, count, 0),
            _padded(position_ids, count, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Outputs [B, S + pad_len, ...] without those of padding."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output


def _padded(x: Tensor | None, count: int, value: int) -> Tensor | None:
    return None if x is None else functional.pad(x, (0, count), value=value)


def _own_config(model: Any) -> None:
    """Copy the config for this model: models made from one share it, and transformers reads the attention there."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _replace(
    config: Any,
    layers: Iterable[nn.Module],
    sparsity_config: SparsityConfig | None,
    length: int,
    make: type[BertSparseSelfAttention],
) -> Iterable[nn.Module]:
    for layer in layers:
        attention: Any = layer.get_submodule("attention")
        old = attention.self
        block = 16 if sparsity_config is None else sparsity_config.block
        with torch.device("meta"):
            new = make(config, sparsity_config, max_seq_length=-(-length // block) * block)
        new.query, new.key, new.value = old.query, old.key, old.value
        new.train(old.training)
        attention.self = new
    return layers
