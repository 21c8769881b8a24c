"""Parse and print counts, bytes and durations ("5e8", "2GiB", "1.5 s", "1-12:00:00")."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_SECONDS = re.compile(r"^\s*\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$")
_DAYTIME = re.compile(r"^(?:(?P<days>[0-9]+)-)?(?P<times>[0-9]+(?::[0-9]{1,2}){0,2})$")
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


def parse_duration(text: str | float) -> float:
    """Seconds of 90, "90", "1:30", "2:00:00" or "1-12:00:00" (days-hours:minutes:seconds; after days hours come first).

    Raises:
        ValueError: the text is no duration, or a negative one.
    """
    if not isinstance(text, str) or _SECONDS.match(text):
        seconds = float(text)
    else:
        match = _DAYTIME.match(text.strip())
        if match is None:
            msg = f"expected seconds, or a time such as 30:00, 2:00:00 or 1-12:00:00, found {text!r}"
            raise ValueError(msg)
        times = [int(part) for part in match["times"].split(":")]
        times = [0] * (3 - len(times)) + times if match["days"] is None else times + [0] * (3 - len(times))
        hours, minutes, rest = times
        seconds = 3600.0 * (24 * int(match["days"] or 0) + hours) + 60 * minutes + rest
    if not 0 <= seconds < math.inf:
        msg = f"expected a duration of at least 0 seconds, found {text!r}"
        raise ValueError(msg)
    return seconds


def format_bytes(count_bytes: float) -> str:
    """Bytes with a binary unit, three significant digits, or four before the next unit begins: 1008 KiB."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            is_whole = unit == "B" or 999.5 <= abs(value) < 1e6
            return f"{value:.0f} {unit}" if is_whole else f"{value:.3g} {unit}"
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


def format_list(items: Iterable[object], most: int) -> str:
    """The first `most` items, and how many more there are: "a, b and 3 more"."""
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def format_ranks(ranks: Iterable[int], most_runs: int = 8) -> str:
    """Ranks for people: "rank 3", "ranks 0-3, 8"; of many runs the first ones."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:most_runs])
    return f"rank{'' if is_one else 's'} {shown}{', ...' if len(runs) > most_runs else ''}"
