"""How near the losses of two runs of the table of pairs are."""

from __future__ import annotations

from tests.helpers.feature import CLOSE, EXACT, FINAL

NEAR, NEAR_ROUNDED = 1e-4, 3e-2
"""Relative, of losses that fall by a tenth: other orders of sums; other places where few bits are rounded."""


def nearness(found: list[float], expected: list[float], is_rounding: bool) -> str:
    """How near losses are."""
    if found == expected:
        return EXACT
    bound = NEAR_ROUNDED if is_rounding else NEAR
    return CLOSE if all(abs(a - b) <= bound * abs(b) for a, b in zip(found, expected, strict=True)) else FINAL
