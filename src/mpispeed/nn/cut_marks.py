"""Marks on activations of which every rank of a slicing group holds another part, cut by sequence or by heads.

Recomputation with partitioned activations cuts what it keeps over the slicing group, and collects it again. That is
right for activations that are equal on all its ranks, and wrong for those that are cut already: these are marked.
"""

from __future__ import annotations

from typing import TypeVar

import torch

T = TypeVar("T", bound=torch.Tensor)

_MARK = "_is_cut_over_slices"


def mark_cut(tensor: T) -> T:
    """Say that the other ranks of the slicing group hold other parts of this activation; gives it back.

    The mark belongs to this tensor object: what is computed from it is marked again, or not. Checkpointed calls
    mark those outputs that have the shape of a marked input.
    """
    setattr(tensor, _MARK, True)
    return tensor


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether `mark_cut` was called for this tensor."""
    return bool(getattr(tensor, _MARK, False))
