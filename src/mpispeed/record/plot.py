"""Curves of series: as a PNG where matplotlib is installed, or in characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpispeed.base.plain import printable
from mpispeed.base.plotting import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = "*o+x#@%&"
"""Signs of curves of a plot in characters; further curves begin anew."""
SHARED = "="
"""Sign where curves meet."""

_MOST_POINTS = 4000
"""Of one curve in a picture; longer ones are drawn by their lowest and highest points."""
_LONGEST_LABEL = 60
_WIDTH_INCHES, _PANEL_INCHES, _MARGIN_INCHES = 9.0, 2.6, 0.5


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one line of a picture: `x` and `y` of one shape [n]; where `y` is not finite nothing is drawn."""

    label: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one pair of axes."""

    title: str
    curves: Sequence[Curve]
    x_label: str = "step"


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points with the shape of the curve: of each of equal runs of points the lowest and the highest.

    Points whose value is not finite are left out.
    """
    is_finite = np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(y) <= most:
        return x, y
    runs = max(1, most // 2)
    edges = np.linspace(0, len(y), runs + 1).astype(np.int64)
    kept = [edge + pick for edge, part in _runs(y, edges) for pick in sorted({int(part.argmin()), int(part.argmax())})]
    return x[kept], y[kept]


def _runs(y: np.ndarray, edges: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return [(int(low), y[low:high]) for low, high in itertools.pairwise(edges) if low < high]


def write_png(path: Path, panels: Sequence[Panel], title: str = "") -> None:
    """Draw panels one below the other; the file is replaced if it is there.

    Raises:
        UsageError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    tall = _MARGIN_INCHES + _PANEL_INCHES * len(panels)
    with picture(path, _WIDTH_INCHES, tall, layout="constrained") as figure:
        figure.suptitle(_label(title, 110), fontsize=10, parse_math=False)
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            _draw(axes, panel)


def _draw(axes: Axes, panel: Panel) -> None:
    for number, curve in enumerate(panel.curves):
        x, y = thinned(curve.x, curve.y, _MOST_POINTS)
        # A number in a place beyond is none that matplotlib can scale an axis to.
        y = np.clip(y, -1e300, 1e300)
        style = "." if len(y) == 1 else "-"
        axes.plot(x, y, style, linewidth=1.2, color=f"C{number % 10}", label=f"_{number}")
    axes.set_title(_label(panel.title), fontsize=9, parse_math=False)
    axes.set_xlabel(panel.x_label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if len(panel.curves) > 1:
        legend = axes.legend(axes.get_lines(), [""] * len(panel.curves), fontsize=7)
        for text, curve in zip(legend.get_texts(), panel.curves, strict=True):
            text.set_parse_math(False)
            text.set_text(_label(curve.label))


def _label(text: str, most: int = _LONGEST_LABEL) -> str:
    return printable(text, most)


def text_plot(panel: Panel, width: int = 72, height: int = 16) -> list[str]:
    """Lines of text: the curves in characters, with the range of both axes.

    Args:
        panel: what to draw.
        width: of the field of the curves, in characters.
        height: of it, in lines.
    """
    parts = [(curve, *thinned(curve.x, curve.y, 20 * width)) for curve in panel.curves]
    drawn = [part for part in parts if len(part[1])]
    lines = [_label(panel.title)]
    if not drawn:
        return [*lines, "  (no points that are finite)"]
    left, right = _range([x for _, x, _ in drawn])
    low, high = _range([y for _, _, y in drawn])
    field = np.full((height, width), " ")
    for curve, x, y in drawn:
        number = next(place for place, other in enumerate(panel.curves) if other is curve)
        _put(field, _places(x, left, right, width), _places(y, low, high, height), MARKS[number % len(MARKS)])
    labels = {0: f"{high:.5g}", height - 1: f"{low:.5g}"}
    wide = max(map(len, labels.values()))
    lines += [f"{labels.get(row, ''):>{wide}} |{''.join(signs).rstrip()}" for row, signs in enumerate(field[::-1])]
    first, last = f"{left:.9g}", f"{right:.9g}"
    space = max(1, width - len(first) - len(last) - len(panel.x_label) - 2)
    lines.append(f"{'':>{wide}} +{'-' * width}")
    lines.append(f"{'':>{wide}}  {first}{' ' * (space // 2 + 1)}{panel.x_label}{' ' * (space - space // 2 + 1)}{last}")
    if len(panel.curves) > 1:
        lines += [f"  {MARKS[number % len(MARKS)]} {_label(each.label)}" for number, each in enumerate(panel.curves)]
        lines.append(f"  {SHARED} several of them")
    return lines + _left_out(panel)


def _left_out(panel: Panel) -> list[str]:
    found = [(curve, int(len(curve.y) - np.isfinite(curve.y).sum())) for curve in panel.curves]
    return [f"  {_label(curve.label)}: {count} points are not finite" for curve, count in found if count]


def _range(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    return float(min(part.min() for part in parts)), float(max(part.max() for part in parts))


def _places(values: np.ndarray, low: float, high: float, count: int) -> np.ndarray:
    """Numbers of cells from 0 to count - 1; the middle where all values are equal."""
    # halves, since the difference of two floats need not be one
    extent = high / 2 - low / 2
    if not extent > 0 or not math.isfinite(extent):
        return np.full(len(values), count // 2)
    shares = np.clip((values / 2 - low / 2) / extent, 0, 1)
    return np.minimum((shares * count).astype(np.int64), count - 1)


def _put(field: np.ndarray, columns: np.ndarray, rows: np.ndarray, mark: str) -> None:
    """Set the cells of a curve: of its points, and of the lines between them."""
    cells = set(zip(columns.tolist(), rows.tolist(), strict=True))
    for (left, first), (right, last) in itertools.pairwise(zip(columns.tolist(), rows.tolist(), strict=True)):
        steps = max(abs(right - left), abs(last - first))
        for step in range(1, steps):
            cells.add((left + round(step * (right - left) / steps), first + round(step * (last - first) / steps)))
    for column, row in cells:
        field[row, column] = mark if field[row, column] == " " else SHARED
