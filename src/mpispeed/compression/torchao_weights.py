"""Quantized weights as tensors of torchao, for programs that work on these. torchao is asked for only here.

Source: `IntxUnpackedToInt8Tensor` of torchao 0.18: codes of 1 to 8 bits in int8, scales and zero points of blocks.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.native.packed_codes import PackedCodes


def require() -> None:
    """Refuse where torchao is missing.

    Raises:
        UsageError: it is not installed, or has no such tensors.
    """
    try:
        _kind()
    except (ImportError, AttributeError) as failure:
        msg = (
            f'redundancy_clean: form="torchao" needs torchao 0.18 or later, which cannot be used here: {failure}; '
            'install it, or leave form at "packed"'
        )
        raise UsageError(msg) from failure


def as_torchao(packed: PackedCodes, dtype: torch.dtype) -> Tensor | None:
    """The weight of a linear layer as a tensor of torchao; None if its groups are not whole rows, or it is no matrix.

    Values are those of the codes, those of asymmetric ones up to the rounding of a product.
    """
    groups = packed.scales.numel()
    if len(packed.shape) != 2 or not groups or packed.shape[0] % groups:
        return None
    rows, width = packed.shape
    scales = packed.scales.repeat_interleave(rows // groups).view(-1, 1)
    codes, zeros = packed.integers().view(rows, width), torch.zeros_like(scales)
    if not packed.is_signed:
        half = 1 << (packed.bits - 1)
        codes = codes - half
        if packed.offsets is not None:
            shifts = packed.offsets.repeat_interleave(rows // groups).view(-1, 1)
            if bool((scales == 0).any()):
                return None  # a row of equal values is its offset, which no zero point is
            zeros = -(shifts / scales).round() - half
    bits = getattr(torch, f"int{max(packed.bits, 2)}")  # those of 1 bit are -1 and 1
    made: Tensor = _kind()(codes.to(torch.int8), scales, zeros, bits, (1, width), dtype, None)
    return made


def _kind() -> Any:
    return importlib.import_module("torchao.quantization").IntxUnpackedToInt8Tensor
