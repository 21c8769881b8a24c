"""Attributes that scripts set on parameters and optimizers read; parts of a parameter keep them."""

from __future__ import annotations

from torch import Tensor, nn

INFSHAPE = "infshape"
"""muP: the widths of a parameter beside those of a base model, as the package mup sets it."""
KEPT = (INFSHAPE, "use_muon")


def part_of(whole: Tensor, values: Tensor) -> nn.Parameter:
    """A parameter of `values`, which are a part or a copy of `whole`, trained if that is, and with its marks."""
    part = nn.Parameter(values, requires_grad=whole.requires_grad)
    for name in KEPT:
        if hasattr(whole, name):
            setattr(part, name, getattr(whole, name))
    return part
