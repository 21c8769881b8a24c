"""Batches that a loader has cut: how their sequences are cut, kept beside their tensors.

Trainers take several batches from a loader before the first one is computed, so the cut cannot be a state of the
loader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mpispeed.nn.sequence.running import Running

_CUTS: Any = WeakTensorKeyDictionary()


def hand(tensors: Iterable[torch.Tensor], running: Running) -> None:
    """Keep the cut of a batch while its tensors live. Local."""
    for tensor in tensors:
        _CUTS[tensor] = running


def handed(tensors: Iterable[torch.Tensor]) -> Running | None:
    """The cut of the batch to which one of the tensors belongs; None: no loader has told. Local."""
    return next((found for tensor in tensors if (found := _CUTS.get(tensor)) is not None), None)
