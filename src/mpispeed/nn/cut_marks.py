"""Marks on activations that are sliced over a slicing group, by sequence or by heads.

Partitioned activations are sliced over the slicing group and gathered again. That is right for activations that are
equal on all its ranks, and wrong for those that are sliced already: these are marked.
"""

from __future__ import annotations

from typing import TypeVar

import torch

T = TypeVar("T", bound=torch.Tensor)

_MARK = "_is_cut_over_slices"


def mark_cut(tensor: T) -> T:
    """Mark that the other ranks of the slicing group hold other parts of this activation; returns it.

    The mark belongs to this tensor object, not to results computed from it. Checkpointed calls mark those outputs that
    have the shape of a marked input.
    """
    setattr(tensor, _MARK, True)
    return tensor


def is_cut(tensor: torch.Tensor) -> bool:
    """True if `mark_cut` was called for this tensor."""
    return bool(getattr(tensor, _MARK, False))
