"""Compression during training: layers whose weights and inputs are quantized, and whose weights are pruned.

A compressible layer stays the object that it is; for the time of its own forward its `weight` and `bias` are the
compressed values.
"""

from mpispeed.nn.compression.layers import LayerState, make_compressible, state_of
from mpispeed.nn.compression.model import Compression, compress, compression_of
from mpispeed.nn.compression.quantizers import Codes, Quantizer, encode, fake_quantize
from mpispeed.nn.compression.techniques import (
    ActivationQuantization,
    Group,
    Pruning,
    Technique,
    WeightQuantization,
    read_groups,
)

__all__ = [
    "ActivationQuantization",
    "Codes",
    "Compression",
    "Group",
    "LayerState",
    "Pruning",
    "Quantizer",
    "Technique",
    "WeightQuantization",
    "compress",
    "compression_of",
    "encode",
    "fake_quantize",
    "make_compressible",
    "read_groups",
    "state_of",
]
