"""Settings of attention over blocks. Section `sparse_attention`.

Source: https://www.deepspeed.ai/docs/config-json (sparse attention).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Natural, Positive, Section


class SparseAttention(Section):
    """Pattern of the computed blocks of the attention matrix; each mode reads its own keys."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = Field("fixed", description="Pattern.")
    block: Positive = Field(16, description="Rows and columns of a block.")
    different_layout_per_head: bool = Field(False, description="Each head has its own pattern.")
    num_local_blocks: Positive = Field(4, description="fixed: blocks of a local window.")
    num_global_blocks: Natural = Field(1, description="fixed, bigbird: blocks that see and are seen by all.")
    attention: Literal["bidirectional", "unidirectional"] = Field(
        "bidirectional", description="fixed, variable: whether later tokens are seen."
    )
    horizontal_global_attention: bool = Field(False, description="fixed, variable: global blocks see all.")
    num_different_global_patterns: Positive = Field(1, description="fixed: patterns spread over heads.")
    num_random_blocks: Natural = Field(0, description="variable, bigbird: random blocks per row.")
    local_window_blocks: list[Positive] = Field([4], description="variable: sizes of local windows.")
    global_block_indices: list[Natural] = Field([0], description="variable, bslongformer: global blocks.")
    global_block_end_indices: list[Natural] | None = Field(
        None, description="variable, bslongformer: ends of the ranges that begin at global_block_indices."
    )
    num_sliding_window_blocks: Positive = Field(3, description="bigbird, bslongformer: blocks of the window.")
