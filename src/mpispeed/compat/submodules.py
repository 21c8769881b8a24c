"""Functions of `deepspeed.compression.helper` that scripts call."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module, or another attribute, of this dotted name.

    Raises:
        AttributeError: there is none.
    """
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put another module, or value, at a dotted name, whose parents there are.

    Raises:
        AttributeError: a parent is missing.
    """
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
