"""The statistics of a checkpoint as a picture: histograms of the largest tensors, and changes of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.base.plain import printable
from mpispeed.base.plotting import picture
from mpispeed.ckpt.tools import stats_drift

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: more small histograms in one picture cannot be read
MOST_HISTOGRAMS = 24
_COLUMNS = 4
#: decades of change that colours tell apart
_COLOUR_RANGE = 1e4
#: layers beyond get no label of their own in a heat map
_MOST_LABELS = 60
_LONGEST_LABEL = 34
_WIDTH_INCHES = 14.0
_HISTOGRAM_INCHES = 2.2
_TITLE_INCHES = 0.5


def write_png(path: Path, report: Mapping[str, Any]) -> None:
    """Draw and write the picture.

    Args:
        path: the file; replaced if it exists.
        report: as for `stats_html.page`.

    Raises:
        CheckpointError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    drift: Mapping[str, Any] | None = report.get("drift")
    shown = chosen(report["params"])
    if drift and len(drift["tags"]) == 1:
        drift = None  # nothing to compare
    heights = [_map_inches(drift)] if drift else []
    rows = math.ceil(len(shown) / _COLUMNS)
    heights += [_HISTOGRAM_INCHES * rows] if rows else []
    with picture(path, _WIDTH_INCHES, sum(heights, _TITLE_INCHES), error=CheckpointError) as figure:
        figure.text(0.5, 1 - 0.25 / figure.get_figheight(), _title(report), fontsize=13, ha="center", parse_math=False)
        # The first band is the title's. Margins are set by hand: measuring all labels would take most of the time.
        bands = figure.subfigures(1 + len(heights), 1, height_ratios=[_TITLE_INCHES, *heights], squeeze=False)[:, 0]
        if drift:
            _draw_maps(bands[1], drift, heights[0])
        if rows:
            _draw_histograms(bands[-1], shown, rows)


def _title(report: Mapping[str, Any]) -> str:
    return _label(f"Checkpoint {report['tag']}, step {report['step']}", 100)


def chosen(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows whose histograms are drawn: the largest tensors that have one, in the order of the report."""
    places = [place for place, row in enumerate(rows) if row["histogram"] is not None]
    largest = sorted(places, key=lambda place: -rows[place]["count"])[:MOST_HISTOGRAMS]
    return [rows[place] for place in sorted(largest)]


def _label(text: str, length: int = _LONGEST_LABEL) -> str:
    """The text without signs that do not show; of long ones the end, which tells parameters apart."""
    plain = printable(text)
    return plain if len(plain) <= length else "..." + plain[3 - length :]


def _draw_histograms(band: Any, rows: Sequence[Mapping[str, Any]], lines: int) -> None:
    axes = band.subplots(lines, _COLUMNS, squeeze=False).ravel()
    tall = _HISTOGRAM_INCHES * lines
    band.subplots_adjust(left=0.04, right=0.985, wspace=0.2, hspace=0.5, top=1 - 0.4 / tall, bottom=0.35 / tall)
    for place, row in zip(axes, rows, strict=False):
        _draw_histogram(place, row)
    for place in axes[len(rows) :]:
        place.set_axis_off()


def _draw_histogram(axes: Axes, row: Mapping[str, Any]) -> None:
    from matplotlib.ticker import NullLocator  # with matplotlib itself, when a picture is drawn

    histogram = row["histogram"]
    low, high, counts = float(histogram["low"]), float(histogram["high"]), histogram["counts"]
    if len(counts) == 1:
        edges = np.array([-0.5, 0.5])  # one value: its place is the label
        axes.set_xticks([0.0], [f"{low:.4g}"])
    else:
        # The axis counts from 0 to 1, because numbers near the limits of float64 or of each other cannot be placed.
        edges = np.linspace(0, 1, len(counts) + 1)
        ends = [low, low / 2 + high / 2, high]
        axes.set_xticks([0.0, 0.5, 1.0], [f"{end:.3g}" for end in ends])
        if low < 0 < high:
            axes.axvline(-low / 2 / (high / 2 - low / 2), color="0.6", linewidth=0.8)
    axes.stairs(counts, edges, fill=True, color="tab:blue", baseline=0.5)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0.5, 2 * max(counts))
    axes.tick_params(labelsize=7)
    slot = "" if row["slot"] == "master" else f" {row['slot']}"
    axes.set_title(_label(row["name"] + slot), fontsize=8, parse_math=False)
    odd = row["nan"] + row["inf"]
    note = f"std {row['std']:.3g}" + (f", {odd} not finite" if odd else "")
    axes.text(0.98, 0.95, note, transform=axes.transAxes, ha="right", va="top", fontsize=7)


def _map_inches(drift: Mapping[str, Any]) -> float:
    _, layers, _ = stats_drift.heat_map(drift, "first_change")
    return 2.0 + 0.17 * min(len(layers), _MOST_LABELS)


def _draw_maps(band: Any, drift: Mapping[str, Any], tall: float) -> None:
    titles = ("relative change since the tag before", "relative change since the first tag")
    axes = band.subplots(1, 2, squeeze=False)[0]
    band.subplots_adjust(left=0.16, right=0.98, wspace=0.4, top=1 - 0.4 / tall, bottom=1.1 / tall)
    for place, role, title in zip(axes, stats_drift.ROLES, titles, strict=True):
        place.set_title(title, fontsize=9)
        _draw_map(band, place, drift, f"{role}_change")


def _draw_map(band: Any, axes: Axes, drift: Mapping[str, Any], column: str) -> None:
    from matplotlib.colors import LogNorm  # with matplotlib itself, when a picture is drawn

    labels, layers, rows = stats_drift.heat_map(drift, column)
    values = np.array([[math.nan if value is None else value for value in row] for row in rows])
    moved = values[values > 0]
    top = float(moved.max()) if moved.size else 1.0
    low = max(float(moved.min()), top / _COLOUR_RANGE) if moved.size else top / 10
    low = low if low < top else top / 10
    clipped = np.ma.masked_invalid(np.maximum(values, low))
    axes.set_facecolor("0.85")  # nothing to compare
    image = axes.imshow(clipped, aspect="auto", interpolation="nearest", norm=LogNorm(low, top), cmap="viridis")
    every = math.ceil(len(layers) / _MOST_LABELS)
    lines = range(0, len(layers), every)
    axes.set_yticks(list(lines), [_label(layers[line]) for line in lines], fontsize=7, parse_math=False)
    apart = math.ceil(len(labels) / 12)
    ticks = range(0, len(labels), apart)
    texts = [_label(labels[tick], 24) for tick in ticks]
    axes.set_xticks(list(ticks), texts, fontsize=7, rotation=30, ha="right", rotation_mode="anchor", parse_math=False)
    band.colorbar(image, ax=axes, pad=0.02).ax.tick_params(labelsize=7)
