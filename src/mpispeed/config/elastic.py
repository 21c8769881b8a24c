"""Batch sizes for changing numbers of ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, Strict

from mpispeed.config.section import Natural, Positive, Section, require_number

MicroBatch = Annotated[int, Strict(), Field(ge=1, le=2**31)]
MOST_SIZES, MOST_RANKS = 32, 100_000
"""Bounds of the search, because all pairs of them are tried."""


class Elasticity(Section):
    """Choose a batch size that many numbers of ranks divide."""

    enabled: bool = Field(False, description="Choose the batch sizes; needs the next two keys.")
    max_train_batch_size: Positive = Field(2000, description="The batch size is not greater than this, as a rule.")
    micro_batch_sizes: list[MicroBatch] = Field(
        [2, 4, 6], max_length=MOST_SIZES, description="Allowed micro-batches; at most 32."
    )
    min_gpus: Positive = Field(1, description="Fewest ranks.")
    max_gpus: Annotated[Positive, Field(le=MOST_RANKS)] = Field(10000, description="Most ranks.")
    min_time: Natural = Field(0, description="Accepted; no effect.")
    version: Annotated[float, Field(gt=0, le=0.2), BeforeValidator(require_number)] = Field(
        0.2, description="0.1: data-parallel ranks that come one by one; 0.2: also nodes and models that ranks share."
    )
    prefer_larger_batch: bool = Field(True, description="Prefer the greater of two equal batches.")
    ignore_non_elastic_batch_info: bool = Field(False, description="Ignore the batch keys instead of refusing them.")
    model_parallel_size: Positive = Field(
        1, description="Ranks that share a model: pipeline stages x slices of layers; above 1 only in version 0.2."
    )
    num_gpus_per_node: Positive = Field(1, description="Ranks of a node; version 0.2 counts whole nodes.")
