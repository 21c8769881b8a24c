"""Scope in which parameters are sharded as modules are constructed; entered by `zero.Init`."""

from __future__ import annotations

_depth = 0


def enter() -> None:
    """Enter the scope."""
    global _depth
    _depth += 1


def leave() -> None:
    """Leave the scope of one `enter`."""
    global _depth
    _depth -= 1


def is_cutting() -> bool:
    """True between `enter` and `leave`."""
    return _depth > 0
