"""Patterns of the computed blocks of the attention matrix, DeepSpeed's: 0 and 1 for each head, row and column.

A row is a block of queries, a column a block of keys. "unidirectional" patterns have nothing above the diagonal; what
is causal inside the blocks on it is up to the attention (`is_causal`, or a mask).

Random blocks come from `seed`, the head and the row, so that all ranks have the same ones without asking each other.

Sources: https://www.deepspeed.ai/tutorials/sparse-attention (the classes and their arguments); Child et al.,
"Generating Long Sequences with Sparse Transformers", 2019 (fixed); Zaheer et al., "Big Bird", 2020; Beltagy et al.,
"Longformer", 2020.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpispeed.base.errors import ConfigError, UnimplementedOption

_DIRECTIONS = ("unidirectional", "bidirectional")


def _directed(attention: str, *, is_horizontal: bool = False) -> str:
    if attention not in _DIRECTIONS:
        msg = f"attention is {attention!r}; the patterns are {' or '.join(_DIRECTIONS)}"
        raise UnimplementedOption(msg)
    if is_horizontal and attention == _DIRECTIONS[0]:
        msg = "horizontal_global_attention lets global blocks see later ones: use it with bidirectional attention only"
        raise ConfigError(msg)
    return attention


def _ranges(starts: Sequence[int], ends: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
    """Global blocks as ranges.

    Raises:
        ConfigError: other numbers of starts and ends, or a range without a block.
    """
    if ends is None:
        return tuple((start, start + 1) for start in starts)
    if len(starts) != len(ends):
        msg = f"global_block_indices has {len(starts)} numbers and global_block_end_indices {len(ends)}; give one each"
        raise ConfigError(msg)
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            msg = f"the global blocks from {start} to before {end} are none; an end is larger than its start"
            raise ConfigError(msg)
    return tuple(zip(starts, ends, strict=True))


class SparsityConfig:
    """A pattern without blocks: the part that all have in common.

    Attributes:
        num_heads: heads of the attention.
        block: tokens of a block.
        different_layout_per_head: each head has its own layout, where the pattern has more than one.
        seed: of random blocks; the same on all ranks.
        attention: "bidirectional" or "unidirectional".
    """

    attention = "bidirectional"

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, *, seed: int = 0
    ) -> None:
        """Check the sizes.

        Raises:
            ConfigError: no heads, or blocks without a token.
        """
        if num_heads < 1 or block < 1:
            msg = f"num_heads is {num_heads} and block {block}; both are at least 1"
            raise ConfigError(msg)
        self.num_heads, self.block, self.seed = num_heads, block, seed
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """An empty layout, int64 [heads, blocks, blocks].

        Raises:
            ConfigError: the length is not a multiple of the block; it is a ValueError too.
        """
        if seq_len % self.block or seq_len < 1:
            msg = f"a sequence of {seq_len} tokens is not a number of whole blocks of {self.block}; pad it to "
            msg += f"{-(-max(seq_len, 1) // self.block) * self.block} (SparseAttentionUtils.pad_to_block_size)"
            raise ConfigError(msg)
        count = seq_len // self.block
        return torch.zeros(self.num_heads, count, count, dtype=torch.int64, device="cpu")

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the layout of the first head to all others, unless each has its own; in place, and returned."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """The blocks of a sequence, int64 [heads, blocks, blocks] of 0 and 1, on the CPU.

        Args:
            seq_len: tokens.

        Raises:
            ConfigError: the length is no multiple of the block, or the pattern needs more blocks.
        """
        layout = self.setup_layout(seq_len)
        with torch.device("cpu"):  # a model may be made on another device, or on none
            for head in range(self.num_layout_heads):
                self._fill(layout[head], head)
                if self.attention == "unidirectional":
                    layout[head].tril_()
        return self.check_and_propagate_first_head_layout(layout)

    def _fill(self, layout: Tensor, head: int) -> None:
        """Set the blocks of one head, [blocks, blocks]; what is above the diagonal is taken away afterwards."""
        msg = "SparsityConfig has no pattern of its own; use one of its kinds, as FixedSparsityConfig"
        raise UnimplementedOption(msg)

    def _sample(self, layout: Tensor, head: int, wanted: int) -> None:
        """Set some random columns of each row; in a unidirectional layout only up to the row."""
        count = len(layout)
        self._require(layout, "num_random_blocks", wanted)
        numbers = random.Random(f"{self.seed} {head}")
        for row in range(count):
            allowed = row + 1 if self.attention == "unidirectional" else count
            layout[row, numbers.sample(range(allowed), min(wanted, allowed))] = 1

    def _require(self, layout: Tensor, name: str, wanted: int) -> None:
        if len(layout) < wanted:
            msg = (
                f"{name} is {wanted}, and a sequence of {len(layout) * self.block} tokens has {len(layout)} blocks of "
            )
            msg += f"{self.block}: use longer sequences, smaller blocks, or fewer of them"
            raise ConfigError(msg)

    def _slide(self, layout: Tensor, width: int) -> None:
        self._require(layout, "num_sliding_window_blocks", width)
        for row in range(len(layout)):
            layout[row, max(0, row - width // 2) : row + width // 2 + 1] = 1


class DenseSparsityConfig(SparsityConfig):
    """All blocks: attention as usual, to compare with."""

    def _fill(self, layout: Tensor, head: int) -> None:
        layout.fill_(1)


class FixedSparsityConfig(SparsityConfig):
    """Local windows side by side, and some blocks of each window that later ones (or all) see."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
        *,
        seed: int = 0,
    ) -> None:
        """Check the pattern.

        Args:
            num_heads: heads of the attention.
            block: tokens of a block.
            different_layout_per_head: heads may have other global blocks.
            num_local_blocks: blocks of a window.
            num_global_blocks: global blocks of a window, the last ones of it in the first pattern.
            attention: "bidirectional" or "unidirectional".
            horizontal_global_attention: global blocks see all, too.
            num_different_global_patterns: head i takes the global blocks of pattern i modulo this.
            seed: of nothing here.

        Raises:
            ConfigError: windows are no whole number of global blocks, or patterns do not fit to heads and windows.
            UnimplementedOption: an unknown `attention`.
        """
        super().__init__(num_heads, block, different_layout_per_head, seed=seed)
        patterns, fitting = num_different_global_patterns, num_local_blocks // max(num_global_blocks, 1)
        if num_global_blocks < 1 or num_local_blocks < 1 or num_local_blocks % num_global_blocks:
            msg = f"num_local_blocks is {num_local_blocks}, no multiple of num_global_blocks, {num_global_blocks}"
            raise ConfigError(msg)
        self.attention = _directed(attention, is_horizontal=horizontal_global_attention)
        if patterns > 1 and not different_layout_per_head:
            msg = f"num_different_global_patterns is {patterns}, which needs different_layout_per_head"
            raise ConfigError(msg)
        if not 1 <= patterns <= fitting:
            msg = f"num_different_global_patterns is {patterns}; windows of {num_local_blocks} blocks with "
            msg += f"{num_global_blocks} global ones have 1 to {fitting}"
            raise ConfigError(msg)
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = patterns

    def _fill(self, layout: Tensor, head: int) -> None:
        count, local, wide = len(layout), self.num_local_blocks, self.num_global_blocks
        first = local - (1 + head % self.num_different_global_patterns) * wide
        for begin in range(0, count, local):
            layout[begin : begin + local, begin : begin + local] = 1
            start = begin + first
            if begin + local > count:  # a short last window has its global blocks where they fit
                start = max(0, min(start, count - wide))
            layout[start if self.attention == "unidirectional" else 0 :, start : start + wide] = 1
            if self.horizontal_global_attention:
                layout[start : start + wide] = 1


class VariableSparsityConfig(SparsityConfig):
    """Random blocks, local windows of chosen sizes, and chosen global blocks."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        """Check the pattern.

        Args:
            num_heads: heads of the attention.
            block: tokens of a block.
            different_layout_per_head: heads have other random blocks.
            num_random_blocks: random blocks of each row.
            local_window_blocks: sizes of windows from the first on; the last size is that of all further ones.
            global_block_indices: global blocks, or the first ones of ranges; those beyond the sequence are left out.
            global_block_end_indices: what these ranges end before; None: single blocks.
            attention: "bidirectional" or "unidirectional".
            horizontal_global_attention: global blocks see all, too.
            seed: of the random blocks.

        Raises:
            ConfigError: windows without a block, or ranges that are none.
            UnimplementedOption: an unknown `attention`.
        """
        super().__init__(num_heads, block, different_layout_per_head, seed=seed)
        self.attention = _directed(attention, is_horizontal=horizontal_global_attention)
        if not local_window_blocks or min(local_window_blocks) < 1:
            msg = f"local_window_blocks is {list(local_window_blocks)}; give at least one size, of at least 1 block"
            raise ConfigError(msg)
        self.global_ranges = _ranges(global_block_indices, global_block_end_indices)
        self.num_random_blocks, self.local_window_blocks = num_random_blocks, tuple(local_window_blocks)
        self.horizontal_global_attention = horizontal_global_attention

    def _windows(self, count: int) -> Iterator[tuple[int, int]]:
        begin, number = 0, 0
        while begin < count:
            size = self.local_window_blocks[min(number, len(self.local_window_blocks) - 1)]
            yield begin, begin + size
            begin, number = begin + size, number + 1

    def _fill(self, layout: Tensor, head: int) -> None:
        self._sample(layout, head, self.num_random_blocks)
        for begin, end in self._windows(len(layout)):
            layout[begin:end, begin:end] = 1
        for begin, end in self.global_ranges:
            layout[:, begin:end] = 1
            if self.horizontal_global_attention:
                layout[begin:end] = 1


class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, a sliding window, and first blocks that see all and that all see."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        *,
        seed: int = 0,
    ) -> None:
        """Check the pattern.

        Args:
            num_heads: heads of the attention.
            block: tokens of a block.
            different_layout_per_head: heads have other random blocks.
            num_random_blocks: random blocks of each row.
            num_sliding_window_blocks: blocks of the window around each row.
            num_global_blocks: first blocks that are global.
            attention: "bidirectional" or "unidirectional".
            seed: of the random blocks.

        Raises:
            UnimplementedOption: an unknown `attention`.
        """
        super().__init__(num_heads, block, different_layout_per_head, seed=seed)
        self.attention = _directed(attention)
        self.num_random_blocks, self.num_global_blocks = num_random_blocks, num_global_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks

    def _fill(self, layout: Tensor, head: int) -> None:
        self._sample(layout, head, self.num_random_blocks)
        self._slide(layout, self.num_sliding_window_blocks)
        self._require(layout, "num_global_blocks", self.num_global_blocks)
        layout[: self.num_global_blocks] = 1
        layout[:, : self.num_global_blocks] = 1


class BSLongformerSparsityConfig(SparsityConfig):
    """Longformer's pattern in blocks: a sliding window, and chosen blocks that see all and that all see."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        *,
        seed: int = 0,
    ) -> None:
        """Check the pattern.

        Args:
            num_heads: heads of the attention.
            block: tokens of a block.
            different_layout_per_head: of no effect: heads are alike.
            num_sliding_window_blocks: blocks of the window around each row.
            global_block_indices: global blocks, or the first ones of ranges; those beyond the sequence are left out.
            global_block_end_indices: what these ranges end before; None: single blocks.
            attention: "bidirectional" or "unidirectional".
            seed: of nothing here.

        Raises:
            ConfigError: ranges that are none.
            UnimplementedOption: an unknown `attention`.
        """
        super().__init__(num_heads, block, different_layout_per_head, seed=seed)
        self.attention = _directed(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_ranges = _ranges(global_block_indices, global_block_end_indices)

    def _fill(self, layout: Tensor, head: int) -> None:
        self._slide(layout, self.num_sliding_window_blocks)
        for begin, end in self.global_ranges:
            layout[begin:end] = 1
            layout[:, begin:end] = 1


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window and nothing else."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
        *,
        seed: int = 0,
    ) -> None:
        """Check the pattern.

        Args:
            num_heads: heads of the attention.
            block: tokens of a block.
            num_sliding_window_blocks: blocks of the window around each row; a unidirectional one has its first half.
            attention: "bidirectional" or "unidirectional".
            seed: of nothing here.

        Raises:
            UnimplementedOption: an unknown `attention`.
        """
        super().__init__(num_heads, block, seed=seed)
        self.attention = _directed(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks

    def _fill(self, layout: Tensor, head: int) -> None:
        self._slide(layout, self.num_sliding_window_blocks)


_OF_RANGES = ("global_block_indices", "global_block_end_indices", "attention")
PATTERNS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "dense": (DenseSparsityConfig, ()),
    "fixed": (
        FixedSparsityConfig,
        (
            "num_local_blocks",
            "num_global_blocks",
            "attention",
            "horizontal_global_attention",
            "num_different_global_patterns",
        ),
    ),
    "variable": (
        VariableSparsityConfig,
        ("num_random_blocks", "local_window_blocks", "horizontal_global_attention", *_OF_RANGES),
    ),
    "bigbird": (
        BigBirdSparsityConfig,
        ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "attention"),
    ),
    "bslongformer": (BSLongformerSparsityConfig, ("num_sliding_window_blocks", *_OF_RANGES)),
}
"""Mode of a config -> its pattern and the keys that it reads, beside `block` and `different_layout_per_head`."""


def sparsity_of(section: Mapping[str, Any], num_heads: int) -> SparsityConfig:
    """The pattern that the keys of a `sparse_attention` section mean.

    Args:
        section: plain values; keys of other modes, and those left out, do not matter.
        num_heads: heads of the attention.

    Raises:
        ConfigError: values that the pattern cannot have.
        UnimplementedOption: an unknown mode or direction.
    """
    mode = section.get("mode", "fixed")
    if mode not in PATTERNS:
        msg = f"sparse_attention.mode is {mode!r}; the modes are {', '.join(PATTERNS)}"
        raise UnimplementedOption(msg)
    make, keys = PATTERNS[mode]
    chosen = {key: section[key] for key in ("block", "different_layout_per_head", *keys) if key in section}
    if "num_random_blocks" in keys:
        chosen.setdefault("num_random_blocks", 0)
    made: SparsityConfig = make(num_heads=num_heads, **chosen)
    return made
