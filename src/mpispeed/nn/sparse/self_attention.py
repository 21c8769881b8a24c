"""Attention over the blocks of a pattern, as a module that scripts put into their layers.

Source: https://www.deepspeed.ai/tutorials/sparse-attention (the module, its modes and masks). Here it takes any
floating dtype, and key and query blocks that the pattern lacks cost neither time nor memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UnfitValue, UnimplementedUse, UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.attention import BlockList, attend_blocks
from mpispeed.nn.sequence.running import Running, current
from mpispeed.nn.sparse.layouts import FixedSparsityConfig, SparsityConfig
from mpispeed.nn.sparse.shared import attend_shared, require_servable

MODES = ("add", "mul")

_lists: WeakValueDictionary[tuple[bytes, tuple[int, ...], int], BlockList] = WeakValueDictionary()
"""Lists by what they hold: all layers of a model use one."""


def list_of(layout: Tensor, block: int) -> BlockList:
    """The list of a layout, [heads or 1, blocks, blocks]; equal layouts have one list."""
    layout = layout.bool().contiguous()
    key = (hashlib.sha256(layout.numpy().tobytes()).digest(), tuple(layout.shape), block)
    found = _lists.get(key)
    if found is None:
        found = _lists[key] = BlockList.of(layout, block)
    return found


def require_mode(name: str, mode: str) -> str:
    """`mode`, if it is one.

    Raises:
        ConfigError: it is none.
    """
    if mode not in MODES:
        msg = f"{name} is {mode!r}; it is {' or '.join(MODES)}"
        raise ConfigError(msg)
    return mode


def as_added(mask: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """A mask as numbers added to the scores: with "mul" -inf where it is 0, and 0 elsewhere."""
    if mode == "add" and mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask == 0, -torch.inf)


class SparseSelfAttention(nn.Module):
    """Softmax attention in which a query sees only keys of the blocks of a pattern.

    Attributes:
        sparsity_config: the pattern.
        is_default: nobody chose the pattern, and an engine may take that of its config.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        """Choose the pattern.

        Args:
            sparsity_config: the pattern; None: that of the engine's config, else `FixedSparsityConfig`.
            key_padding_mask_mode: "add": the mask is added to the scores; "mul": keys with 0 are not seen.
            attn_mask_mode: the same for `attn_mask`.
            max_seq_length: tokens for which the pattern is made; shorter sequences take its first rows and columns.

        Raises:
            ConfigError: an unknown mode, or the pattern does not fit to `max_seq_length`.
        """
        super().__init__()
        self.key_padding_mask_mode = require_mode("key_padding_mask_mode", key_padding_mask_mode)
        self.attn_mask_mode = require_mode("attn_mask_mode", attn_mask_mode)
        self.max_seq_length = max_seq_length
        self.is_default = sparsity_config is None
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self._of_heads: Callable[[int], SparsityConfig] | None = None
        self._layout: Tensor | None = None
        self._blocks: dict[tuple[int, tuple[int, int]], BlockList] = {}
        if sparsity_config is not None:
            self._layout = self.master_layout

    @property
    def master_layout(self) -> Tensor:
        """The pattern for `max_seq_length`, int64 [heads, blocks, blocks], on the CPU."""
        if self._layout is None:
            block = self.sparsity_config.block
            self._layout = self.sparsity_config.make_layout(-(-self.max_seq_length // block) * block)
        return self._layout

    def adopt(self, of_heads: Callable[[int], SparsityConfig]) -> None:
        """Take another pattern: `of_heads(number of heads)`, asked when a pass first tells the number. Local."""
        self._of_heads, self._layout = of_heads, None
        self._blocks.clear()

    def get_layout(self, L: int) -> Tensor:
        """The layout of sequences of `L` tokens, [heads, blocks, blocks].

        Raises:
            UnfitValue: `L` is no multiple of the block, or longer than `max_seq_length`.
        """
        block = self.sparsity_config.block
        if L % block:
            msg = f"a sequence of {L} tokens is not a number of whole blocks of {block}; pad it to "
            msg += f"{-(-L // block) * block} (SparseAttentionUtils.pad_to_block_size)"
            raise UnfitValue(msg)
        if self.max_seq_length < L:
            msg = f"a sequence has {L} tokens, and the pattern was made for max_seq_length={self.max_seq_length}; give "
            msg += "SparseSelfAttention that of the longest sequence"
            raise UnfitValue(msg)
        return self.master_layout[:, : L // block, : L // block]

    def pattern_for(self, heads: int) -> SparsityConfig:
        """The pattern, made now if it waited for the number of heads."""
        if self._of_heads is not None:
            self.sparsity_config, self._of_heads = self._of_heads(heads), None
        return self.sparsity_config

    def blocks_of(self, length: int, heads: int, own: tuple[int, int] | None = None) -> BlockList:
        """The list of blocks for sequences of this length, made once; `own` are the heads it is for, None: all.

        Raises:
            UnfitValue: as `get_layout`.
        """
        self.pattern_for(heads)
        own = (0, heads) if own is None else own
        if (length, own) not in self._blocks:
            layout = self.get_layout(length)
            if bool((layout == layout[:1]).all()):
                layout = layout[:1]
            elif own != (0, heads):
                layout = layout[slice(*own)]
            self._blocks[length, own] = list_of(layout, self.sparsity_config.block)
        return self._blocks[length, own]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            query: [B, h, S, d], S a multiple of the block; where ranks share the sequence, this rank's part of it.
            key: the same, or [B, h, d, S].
            value: [B, h, S, d].
            rpe: added to the scores, [S, S] or what broadcasts to [B, h, S, S]; it gets no gradient.
            key_padding_mask: [B, S], or with further dims of size 1; no gradient.
            attn_mask: [S, S], or with further dims of size 1; no gradient.
            is_causal: no token sees a later one. Layouts are about blocks only: a "unidirectional" one alone lets
                tokens see later ones of their block.

        Returns:
            [B, h, S, d]; zeros where a query sees no key.

        Collective over: the ranks of the sequence axis, if they share the sequence; the same in backward.

        Raises:
            UnfitValue: S is no multiple of the block, or longer than `max_seq_length`.
            UnimplementedUse: query, key and value have other shapes, so this is not self-attention; or ranks share
                the sequence in a ring, or with masks.
            UsageError: masks, dtypes or the heads of the pattern do not fit.
        """
        if key.shape != query.shape:
            key = key.transpose(-1, -2)
        if not query.shape == key.shape == value.shape:
            msg = f"query, key and value are {[tuple(x.shape) for x in (query, key, value)]}; blocks serve "
            msg += "self-attention only, with one shape [B, h, S, d] for all three"
            raise UnimplementedUse(msg)
        running = current()
        if running is not None and running.group is not None and running.group.size > 1:
            require_servable(running, rpe, key_padding_mask, attn_mask)
            return self._shared(query, key, value, running, running.group.ulysses, is_causal=is_causal)
        blocks = self.blocks_of(query.shape[2], query.shape[1])
        dtype = query.dtype if query.dtype == torch.float64 else torch.float32
        key_mask = mask = None
        if key_padding_mask is not None:
            key_mask = as_added(key_padding_mask.reshape(query.shape[0], -1), self.key_padding_mask_mode, dtype)
        if attn_mask is not None:
            mask = as_added(attn_mask.reshape(attn_mask.shape[-2:]), self.attn_mask_mode, dtype)
        if rpe is not None:
            rpe = rpe.detach().to(dtype)
            mask = rpe if mask is None else mask + rpe
        return attend_blocks(query, key, value, blocks, mask=mask, key_mask=key_mask, is_causal=is_causal)

    def _shared(
        self, query: Tensor, key: Tensor, value: Tensor, running: Running, comm: Comm, *, is_causal: bool
    ) -> Tensor:
        """Attention of a sequence that ranks share. Collective over: the ranks of `comm`."""
        heads, length = query.shape[1], running.layout.length
        self.pattern_for(heads)
        self.get_layout(length)  # refused before anything is sent
        self._check_heads(heads)

        def of_own(q: Tensor, k: Tensor, v: Tensor, own: tuple[int, int], key_mask: Tensor | None) -> Tensor:
            return attend_blocks(q, k, v, self.blocks_of(length, heads, own), key_mask=key_mask, is_causal=is_causal)

        return attend_shared(query, key, value, running, comm, of_own)

    def _check_heads(self, heads: int) -> None:
        """Refuse a pattern of other heads here: ranks have different ones, and not each would see it.

        Raises:
            UsageError: there are patterns for heads, and not for so many.
        """
        layout = self.master_layout
        if layout.shape[0] not in (1, heads) and not bool((layout == layout[:1]).all()):
            msg = f"the pattern is for {layout.shape[0]} heads, and query has {heads}; give it num_heads={heads}"
            raise UsageError(msg)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the layout that DeepSpeed's module keeps as a buffer."""
        kept = state_dict.pop(prefix + "master_layout", None)
        if kept is not None:
            self._layout = kept.to("cpu", torch.int64)
            self._blocks.clear()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The pattern, for `print(model)`."""
        return f"{type(self.sparsity_config).__name__}, block={self.sparsity_config.block}"
