"""Batches that are cut to a length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import UsageError
from mpispeed.base.tensor_tree import map_tensors

if TYPE_CHECKING:
    import torch


def truncate(batch: Any, length: int, *, dim: int = 1) -> Any:
    """A batch whose tensors have at most `length` entries in a dimension.

    Args:
        batch: tensors in dicts, lists and tuples, also named ones, at any depth; other values stay as they are.
        length: at least 1.
        dim: the dimension of the sequence; tensors without it stay as they are, such as labels of whole samples [B].

    Returns:
        The same structure. Cut tensors are contiguous copies, so that the rest is let go; others are the same objects.

    Raises:
        UsageError: the length is below 1.
    """
    if length < 1:
        msg = f"truncate(batch, length={length!r}): expected a length of at least 1"
        raise UsageError(msg)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() <= dim or x.size(dim) <= length else x.narrow(dim, 0, length).contiguous()

    return map_tensors(batch, cut)
