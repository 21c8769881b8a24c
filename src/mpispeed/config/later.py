"""Sections of features that are not available yet: they are read and checked, and `unavailable` refuses them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mpispeed.config.section import Positive, Section


class HybridEngine(Section):
    """Train and generate with one set of weights."""

    enabled: bool = Field(False, description="Switch between training and generation.")
    max_out_tokens: Positive = Field(512, description="Most generated tokens.")
    inference_tp_size: Positive = Field(1, description="Ranks that share a layer while generating.")
    release_inference_cache: bool = Field(False, description="Free the key/value cache after each generation.")
    pin_parameters: bool = Field(True, description="Keep parameters in page-locked memory.")
    tp_gather_partition_size: Positive = Field(8, description="Ranks that gather weights together.")


class WeightQuantization(Section):
    """Weights in few bits for inference."""

    enabled: bool = Field(True, description="Quantize what the last two keys name.")
    num_bits: Positive = Field(8, description="Bits of a weight.")
    q_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="Range of the integers.")
    q_groups: Positive = Field(1, description="Groups with their own scale.")
    quantized_initialization: dict[str, Any] = Field(default_factory=dict, description="Quantize while building.")
    post_init_quant: dict[str, Any] = Field(default_factory=dict, description="Quantize after building.")
