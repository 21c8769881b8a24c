"""Attributes of single modules in place of those of their class, until they are taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def put_on(found: Iterable[tuple[nn.Module, str, Any]]) -> Callable[[], None]:
    """Give modules attributes of their own, and return what takes them back.

    Args:
        found: module, name and value; what a module has of its own under that name already stays.
    """
    changed: list[tuple[nn.Module, str]] = []
    for module, name, value in found:
        if name not in vars(module):
            setattr(module, name, value)
            changed.append((module, name))

    def undo() -> None:
        for module, name in changed:
            vars(module).pop(name, None)
        changed.clear()

    return undo
