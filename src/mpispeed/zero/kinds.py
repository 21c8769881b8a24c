"""Kinds of model states that can leave memory for a while."""

from __future__ import annotations

from enum import Enum


class OffloadStateTypeEnum(str, Enum):
    """What `engine.offload_states` takes out of memory; the plain strings mean the same.

    Source: names and meaning as in DeepSpeed's documentation of `offload_states`.
    """

    optim_states = "optim_states"
    """State of the optimizer."""
    hp_params = "hp_params"
    """Masters that are not the parameters themselves."""
    lp_params = "lp_params"
    """Parameters that the model computes with; in fp32 training they are the masters too."""
    lp_grads = "lp_grads"
    """Accumulated gradients."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Scratch buffers that nobody uses; they are freed, and made again when they are needed."""

    def __str__(self) -> str:
        return self.value
