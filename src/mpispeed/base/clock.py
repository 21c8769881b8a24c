"""Accumulated wall-clock time. Measuring never synchronises ranks or devices: it must not change the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timer:
    """Accumulated time of one name."""

    seconds: float = 0.0
    count: int = 0
