"""Batches: tensors in lists, tuples, named tuples and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with `fn` of its tensors; containers are copied, other types are returned as they are."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        result = copy.copy(tree)
        for key, value in tree.items():
            result[key] = map_tensors(value, fn)
        return result
    if isinstance(tree, tuple):
        items = [map_tensors(item, fn) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, list):
        return [map_tensors(item, fn) for item in tree]
    return tree


def move(tree: Any, device: torch.device) -> Any:
    """`tree` with its tensors on `device`; those that are there already are the same objects.

    Copies out of page-locked memory are queued; what the caller's stream does next comes after them.
    """
    return map_tensors(tree, lambda x: x.to(device, non_blocking=device.type != "cpu"))
