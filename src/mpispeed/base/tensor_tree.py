"""Batches: tensors in lists, tuples, named tuples and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(
    tree: Any, fn: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any] | None = None
) -> Any:
    """Apply `fn` to the tensors of `tree`; containers are copied, other types are returned as they are.

    `other` is applied to other objects with a method `to`, as packed sequences and batches of libraries.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if other is not None and callable(getattr(tree, "to", None)):
        return other(tree)
    if isinstance(tree, dict):
        result = copy.copy(tree)
        for key, value in tree.items():
            result[key] = map_tensors(value, fn, other)
        return result
    if isinstance(tree, tuple):
        items = [map_tensors(item, fn, other) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, list):
        return [map_tensors(item, fn, other) for item in tree]
    return tree


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of lists, tuples and mappings, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)


def move(tree: Any, device: torch.device, *, is_own: bool = False) -> Any:
    """Move the tensors of `tree` to `device`; those that are there already are the same objects.

    Args:
        tree: of tensors, and of what moves itself by a method `to`.
        device: where they go.
        is_own: nobody writes to the tensors any more, so that copies out of page-locked memory need only be queued.
    """
    if device.type == "cpu":
        return map_tensors(tree, lambda x: x.to(device))
    return map_tensors(tree, lambda x: x.to(device, non_blocking=is_own), lambda batch: batch.to(device))
