"""Whether parameters of modules that are built now are cut over ranks at once: `zero.Init` says so, others ask."""

from __future__ import annotations

_depth = 0


def enter() -> None:
    """From now on they are."""
    global _depth
    _depth += 1


def leave() -> None:
    """End of one `enter`."""
    global _depth
    _depth -= 1


def is_cutting() -> bool:
    """True between `enter` and `leave`."""
    return _depth > 0
