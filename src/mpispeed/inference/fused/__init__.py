"""Layers of known models run by fused forwards that share their parameters."""

from mpispeed.inference.fused.cache import GrowingLayer, growing_cache, wants_growing_cache
from mpispeed.inference.fused.injection import Report, has_known_layer, inject_kernels
from mpispeed.inference.fused.policies import (
    BLOOMLayerPolicy,
    HFBertLayerPolicy,
    HFGPT2LayerPolicy,
    HFGPTJLayerPolicy,
    HFGPTNEOLayerPolicy,
    HFOPTLayerPolicy,
    LLAMALayerPolicy,
    TransformerPolicy,
    split_policies,
)

__all__ = [
    "BLOOMLayerPolicy",
    "GrowingLayer",
    "HFBertLayerPolicy",
    "HFGPT2LayerPolicy",
    "HFGPTJLayerPolicy",
    "HFGPTNEOLayerPolicy",
    "HFOPTLayerPolicy",
    "LLAMALayerPolicy",
    "Report",
    "TransformerPolicy",
    "growing_cache",
    "has_known_layer",
    "inject_kernels",
    "split_policies",
    "wants_growing_cache",
]
