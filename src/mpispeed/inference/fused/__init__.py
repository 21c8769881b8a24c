"""Layers of known models run by fused forwards that share their parameters."""

from mpispeed.inference.fused.cache import GrowingLayer, growing_cache
from mpispeed.inference.fused.injection import Report, inject_kernels
from mpispeed.inference.fused.policies import (
    HFBertLayerPolicy,
    HFGPT2LayerPolicy,
    HFGPTJLayerPolicy,
    HFGPTNEOLayerPolicy,
    HFOPTLayerPolicy,
    LLAMALayerPolicy,
    TransformerPolicy,
)

__all__ = [
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
    "inject_kernels",
]
