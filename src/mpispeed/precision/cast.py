"""Casts batches and modules to the compute dtype; integers, booleans and complex numbers stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def cast_inputs(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating tensors in `dtype`, looked for in lists, tuples, named tuples and dicts.

    Containers are copied, leaves that need no cast are the same objects; other types are returned as they are.
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        result = copy.copy(tree)
        for key, value in tree.items():
            result[key] = cast_inputs(value, dtype)
        return result
    if isinstance(tree, tuple):
        items = [cast_inputs(item, dtype) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, list):
        return [cast_inputs(item, dtype) for item in tree]
    return tree


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
