"""Layers whose weights are kept as 8-bit or 4-bit codes.

`quantize_model` changes the layers of a model in place; a `Quantizer` does it layer by layer, e.g. while weights are
read. `QuantOptions` says which layers, and how.
"""

from mpispeed.inference.quantized.layers import Format, dequantized, is_quantized, quantize_module
from mpispeed.inference.quantized.model import Quantizer, Report, quantize_model
from mpispeed.inference.quantized.options import QuantOptions, Rule, options_of, rules_of

__all__ = [
    "Format",
    "QuantOptions",
    "Quantizer",
    "Report",
    "Rule",
    "dequantized",
    "is_quantized",
    "options_of",
    "quantize_model",
    "quantize_module",
    "rules_of",
]
