"""Parse and print counts, bytes and durations ("5e8", "2GiB", "1.5 s")."""

from __future__ import annotations

import math
import re

_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_QUANTITY = re.compile(r"^\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgtp]?)(i?)(b?)\s*$", re.IGNORECASE)


def parse_count(text: str | int | float) -> int:
    """Whole number from 5e8, "5e8", "64Ki" or "2GiB".

    Raises:
        ValueError: the text is no number, or not a whole one.
    """
    if isinstance(text, bool):
        msg = f"expected a number, found {text!r}"
        raise ValueError(msg)  # noqa: TRY004  one error type for every text that is no count
    if isinstance(text, str):
        match = _QUANTITY.match(text)
        if match is None:
            msg = f"expected a number such as 500000000, 5e8 or 2GiB, found {text!r}"
            raise ValueError(msg)
        digits, prefix, binary, _ = match.groups()
        factor = 1 if not prefix else (_BINARY if binary else _DECIMAL)[prefix.lower()]
        value = float(digits) * factor
    else:
        value = float(text)
    if not math.isfinite(value) or value != int(value):
        msg = f"expected a whole number, found {text!r}"
        raise ValueError(msg)
    return int(value)


def format_bytes(count_bytes: float) -> str:
    """Bytes with a binary unit, three significant digits."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError


def format_count(count: float) -> str:
    """Count with a decimal suffix: 7400000 -> 7.4M."""
    value = float(count)
    for suffix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}T"


def format_duration(seconds: float) -> str:
    """Seconds for people: 0.0123 -> 12.3 ms, 75 -> 1:15, 3700 -> 1:01:40."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
