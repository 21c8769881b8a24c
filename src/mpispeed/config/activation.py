"""Activation checkpointing."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.section import Positive, Section


class ActivationCheckpointing(Section):
    """How activations that are kept for the backward pass are stored."""

    partition_activations: bool = Field(False, description="Cut kept activations over the slices of a layer.")
    cpu_checkpointing: bool = Field(False, description="Keep them in host memory.")
    contiguous_memory_optimization: bool = Field(
        False, description="Keep them in one buffer; needs partition_activations and number_checkpoints."
    )
    number_checkpoints: Positive | None = Field(
        None, description="Recomputed blocks whose backward is still to come, at most; the slots of the one buffer."
    )
    synchronize_checkpoint_boundary: bool = Field(False, description="Synchronize the device at each block.")
    profile: bool = Field(False, description="Time forward and backward of each block.")
