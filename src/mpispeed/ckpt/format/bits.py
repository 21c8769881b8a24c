"""Conversion between torch tensors and the bytes that the format stores."""

from __future__ import annotations

import math

import numpy as np
import torch

from mpispeed.ckpt.format import schema


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name of the format."""
    dtype: torch.dtype = getattr(torch, schema.dtype_name(name))
    return dtype


def as_bytes(values: torch.Tensor) -> memoryview:
    """The memory of a flat contiguous CPU tensor, writable and without a copy."""
    flat = values.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def as_array(values: torch.Tensor) -> np.ndarray:
    """A tensor of any device and strides as a numpy array of the storage dtype, same shape."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    storage = schema.STORAGE[schema.dtype_name(values.dtype)]
    return np.frombuffer(as_bytes(flat), dtype=storage).reshape(tuple(values.shape))


def from_array(array: np.ndarray, name: str) -> torch.Tensor:
    """The tensor of dtype `name` whose stored form is `array`; owns its memory."""
    out = torch.empty(math.prod(array.shape), dtype=torch_dtype(name))
    as_bytes(out)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return out.reshape(array.shape)
