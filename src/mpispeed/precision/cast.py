"""Casts batches and modules to the compute dtype; integers, booleans and complex numbers stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpispeed.base.tensor_tree import map_tensors


def cast_inputs(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating tensors in `dtype`, looked for in lists, tuples, named tuples and dicts.

    Containers are copied, leaves that need no cast are the same objects; other types are returned as they are.
    """
    return map_tensors(tree, lambda x: x.to(dtype) if x.is_floating_point() else x)


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast floating parameters, their gradients and buffers of `module` in place, and return it.

    The tensor objects stay the same, so tied parameters stay tied and optimizers keep their references.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if grad is None else grad.to(dtype)
    for buffer in module.buffers():
        if buffer.is_floating_point() and buffer.dtype != dtype:
            buffer.data = buffer.data.to(dtype)
    return module
