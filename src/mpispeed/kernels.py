"""Fused operations for models: attention, norms, activations, dropout, rotary embedding, tokens, gradient norms.

Each is a kernel on a GPU; elsewhere plain torch computes the same.
"""

from mpispeed.native.attention import attention
from mpispeed.native.device_norm import norm_and_finite
from mpispeed.native.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mpispeed.native.rotary import merge_heads, rotary_tables, split_qkv
from mpispeed.native.softmax import causal_softmax, masked_softmax
from mpispeed.native.token_drop import gather, scatter
from mpispeed.native.transformer import bias_dropout_residual, bias_gelu, gelu

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "bias_dropout_residual",
    "bias_gelu",
    "causal_softmax",
    "gather",
    "gelu",
    "layer_norm",
    "masked_softmax",
    "merge_heads",
    "norm_and_finite",
    "rms_norm",
    "rotary_tables",
    "scatter",
    "split_qkv",
]
