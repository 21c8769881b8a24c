"""Models that answer: sliced, loaded, quantized and run by `init_inference`.

Knows the config, meshes, slicing, checkpoints and native code. Must not know batches of prompts, files of answers, or
job schedulers. Only `api`, `build` and what they read see the settings; parts take plain values.

The public names are imported when they are first used, as the parts lie below this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpispeed.inference.api import default_inference_config, init_inference
    from mpispeed.inference.engine import InferenceEngine
    from mpispeed.inference.fused.cache import growing_cache
    from mpispeed.inference.fused.policies import (
        BLOOMLayerPolicy,
        HFBertLayerPolicy,
        HFGPT2LayerPolicy,
        HFGPTJLayerPolicy,
        HFGPTNEOLayerPolicy,
        HFOPTLayerPolicy,
        LLAMALayerPolicy,
        TransformerPolicy,
    )
    from mpispeed.inference.quantized import Quantizer, QuantOptions, quantize_model

__all__ = [
    "BLOOMLayerPolicy",
    "HFBertLayerPolicy",
    "HFGPT2LayerPolicy",
    "HFGPTJLayerPolicy",
    "HFGPTNEOLayerPolicy",
    "HFOPTLayerPolicy",
    "InferenceEngine",
    "LLAMALayerPolicy",
    "QuantOptions",
    "Quantizer",
    "TransformerPolicy",
    "default_inference_config",
    "growing_cache",
    "init_inference",
    "quantize_model",
]

_HOME = {
    "BLOOMLayerPolicy": "fused.policies",
    "HFBertLayerPolicy": "fused.policies",
    "HFGPT2LayerPolicy": "fused.policies",
    "HFGPTJLayerPolicy": "fused.policies",
    "HFGPTNEOLayerPolicy": "fused.policies",
    "HFOPTLayerPolicy": "fused.policies",
    "InferenceEngine": "engine",
    "LLAMALayerPolicy": "fused.policies",
    "QuantOptions": "quantized",
    "Quantizer": "quantized",
    "TransformerPolicy": "fused.policies",
    "default_inference_config": "api",
    "growing_cache": "fused.cache",
    "init_inference": "api",
    "quantize_model": "quantized",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        raise AttributeError(msg)
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found
