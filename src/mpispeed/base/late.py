"""What a lower floor needs from a higher one: named by the composition root, imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

from mpispeed.base.errors import UsageError

_PLACES: dict[str, str] = {}


def provide(name: str, place: str) -> None:
    """Say where `name` is: `place` is "package.module:attribute"."""
    _PLACES[name] = place


def find(name: str) -> Any:
    """The object that was provided under `name`.

    Raises:
        UsageError: nothing was.
    """
    if name not in _PLACES:
        known = ", ".join(sorted(_PLACES)) or "nothing"
        msg = f"nothing is provided as {name!r}, only {known}; import mpispeed, which names these places"
        raise UsageError(msg)
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
