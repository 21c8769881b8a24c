"""Charts as SVG that stand in a page and take its colours; no script draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 720
ROW = 26
LABEL_PIXELS = 7.2
MOST_LABEL = 46
COLOURS = ("var(--chart-ours)", "#c2571a", "#2e8540", "#8a3ffc", "#b28600", "#d4237a", "#0f8b8d", "#6b6b6b")


def bars(values: Mapping[str, tuple[float, str]], peers: Sequence[str]) -> list[str]:
    """A horizontal bar for each name.

    Args:
        values: for each name its value, 0 or more, and how it is written.
        peers: the names that are no work of ours; they are drawn in grey.
    """
    most = max(value for value, _ in values.values()) or 1.0
    labels = {name: name if len(name) <= MOST_LABEL else name[: MOST_LABEL - 1] + "…" for name in values}
    left = max(map(len, labels.values())) * LABEL_PIXELS + 12
    room = WIDTH - left - 110
    height = ROW * len(values) + 8
    lines = _head(height, "bar chart: " + "; ".join(f"{name} {text}" for name, (_, text) in values.items()))
    for at, (name, (value, text)) in enumerate(values.items()):
        top = ROW * at + 4
        long = max(room * value / most, 1.0)
        colour = "var(--chart-peer)" if name in peers else "var(--chart-ours)"
        lines += [
            f'<text x="{left - 8:.0f}" y="{top + 16}" text-anchor="end">{escape(labels[name])}</text>',
            f'<rect x="{left:.0f}" y="{top + 3}" width="{long:.1f}" height="{ROW - 8}" rx="2" fill="{colour}"/>',
            f'<text x="{left + long + 6:.0f}" y="{top + 16}">{escape(text)}</text>',
        ]
    return _tail(lines)


def curves(across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    """A line for each name, with axes from the least to the greatest value.

    Args:
        across: what the horizontal axis has.
        up: what the vertical axis has.
        series: the points of each line.
    """
    points = [point for line in series.values() for point in line]
    (low_x, high_x), (low_y, high_y) = (_bounds(each) for each in zip(*points, strict=True))
    left, top, right, bottom = 62, 12, WIDTH - 14, 300
    height = bottom + 46 + 20 * len(series)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - low_x) / (high_x - low_x) * (right - left), bottom - (y - low_y) / (high_y - low_y) * (
            bottom - top
        )

    lines = _head(height, f"line chart of {up} by {across}: {', '.join(series)}")
    for tick in _ticks(low_y, high_y):
        y = place(low_x, tick)[1]
        lines += [
            f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>',
        ]
    for tick in _ticks(low_x, high_x):
        x = place(tick, low_y)[0]
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    lines.append(f'<text x="{(left + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle">{escape(across)}</text>')
    for at, (name, line) in enumerate(series.items()):
        colour = COLOURS[at % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        y = bottom + 56 + 20 * at
        lines += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<rect x="{left}" y="{y - 9}" width="14" height="4" fill="{colour}"/>',
            f'<text x="{left + 22}" y="{y - 2}">{escape(name)}</text>',
        ]
    return _tail(lines)


def _head(height: float, label: str) -> list[str]:
    return [
        "```{raw} html",
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">',
    ]


def _tail(lines: list[str]) -> list[str]:
    return [*lines, "</svg>", "```", ""]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def _ticks(low: float, high: float) -> list[float]:
    """About five round values between two."""
    raw = (high - low) / 5
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw)
    first = math.ceil(low / step)
    return [round(step * at, 12) for at in range(first, math.floor(high / step) + 1)]
