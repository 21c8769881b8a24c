"""Optimizers and schedules of torch by the names that settings use."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimizer classes of torch.optim by name."""
    return _subclasses(vars(torch.optim), torch.optim.Optimizer)


def schedules() -> dict[str, type[torch.optim.lr_scheduler.LRScheduler]]:
    """The classes of torch.optim.lr_scheduler by name."""
    return _subclasses(vars(torch.optim.lr_scheduler), torch.optim.lr_scheduler.LRScheduler)


def why_unusable(cls: type[torch.optim.Optimizer]) -> str:
    """Reason why an optimizer cannot update windows of masters; empty if it can."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return "its step() needs a closure that evaluates the model again"
    return ""


def _subclasses(names: dict[str, Any], base: type[Any]) -> dict[str, type[Any]]:
    found = {name: entry for name, entry in names.items() if isinstance(entry, type) and not name.startswith("_")}
    return {name: entry for name, entry in found.items() if issubclass(entry, base) and entry is not base}
