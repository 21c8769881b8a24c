"""Drawings of a schedule in time, as text or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.errors import UsageError
from mpispeed.base.plotting import picture
from mpispeed.pipe import instructions as do
from mpispeed.pipe.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: longer rows cannot be read, and times without a common unit would fill memory
MOST_COLUMNS = 20_000
_LETTERS: dict[type, str] = {
    do.ForwardPass: "F",
    do.BackwardPass: "B",
    do.BackwardInput: "I",
    do.BackwardWeight: "W",
}
_COLOURS: dict[type, str] = {
    do.ForwardPass: "#7fb3e6",
    do.BackwardPass: "#8fd19e",
    do.BackwardInput: "#8fd19e",
    do.BackwardWeight: "#f2c078",
}
_NAMES: dict[type, str] = {
    do.ForwardPass: "forward",
    do.BackwardPass: "backward",
    do.BackwardInput: "backward, inputs",
    do.BackwardWeight: "backward, weights",
}
_IDLE = "."
_GOES_ON = "-"
_ROW_INCHES = 0.5
_LEAST_INCHES = 8.0
_MOST_INCHES = 40.0
_COLUMN_INCHES = 0.3
#: labels of narrower passes could not be read
_LABEL_INCHES = 0.22


def label(span: Span, chunks: int) -> str:
    """F3 for the forward pass of micro-batch 3; with several chunks F3a, F3b and so on."""
    chunk = _chunk_name(span.chunk) if chunks > 1 else ""
    return f"{_LETTERS[span.kind]}{span.micro_batch}{chunk}"


def _chunk_name(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f"({chunk})"


def text(timeline: Timeline, width: int | None = None) -> str:
    """One row per stage, one column per time unit: F forward, B backward, I its inputs, W its weights, . idle.

    Args:
        timeline: is drawn.
        width: characters of a line; longer rows go on below. None: whole rows.

    Raises:
        UsageError: there are more than `MOST_COLUMNS` columns.
    """
    if timeline.columns > MOST_COLUMNS:
        msg = (
            f"the drawing has {timeline.columns} columns of {timeline.unit} each, at most {MOST_COLUMNS} are drawn; "
            "choose times of passes with a larger common unit"
        )
        raise UsageError(msg)
    cell = 1 + max(len(label(span, timeline.chunks)) for spans in timeline.stages for span in spans)
    rows = [_cells(spans, timeline, cell) for spans in timeline.stages]
    heads = [f"stage {place} |" for place in range(len(rows))]
    margin = max(map(len, heads))
    per_line = timeline.columns if width is None else max(1, (width - margin) // cell)
    bands = []
    for start in range(0, timeline.columns, per_line):
        bands.append(
            "\n".join(
                (head.ljust(margin) + "".join(row[start : start + per_line])).rstrip()
                for head, row in zip(heads, rows, strict=True)
            )
        )
    return "\n\n".join(bands)


def _cells(spans: tuple[Span, ...], timeline: Timeline, cell: int) -> list[str]:
    cells = [_IDLE.ljust(cell)] * timeline.columns
    for span in spans:
        if span.end > span.start:
            # A pass of several units goes on up to the column before its end.
            long = label(span, timeline.chunks).ljust((span.end - span.start) * cell - 1, _GOES_ON) + " "
            for place in range(span.end - span.start):
                cells[span.start + place] = long[place * cell : (place + 1) * cell]
    return cells


def write_png(path: Path, timeline: Timeline, title: str = "") -> None:
    """Draw and write a picture: one bar per pass; later chunks are paler.

    Args:
        path: the file; replaced if it exists.
        timeline: is drawn.
        title: above the picture.

    Raises:
        UsageError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    wide = min(_MOST_INCHES, max(_LEAST_INCHES, _COLUMN_INCHES * timeline.columns))
    with picture(path, wide, 1.6 + _ROW_INCHES * len(timeline.stages), layout="constrained") as figure:
        from matplotlib.patches import Patch  # with matplotlib itself, when a picture is drawn

        axes = figure.subplots()
        _draw_bars(axes, timeline, wide / timeline.columns)
        axes.set_title(title, fontsize=10, parse_math=False)
        used = {span.kind for spans in timeline.stages for span in spans}
        keys = [Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]) for kind in _LETTERS if kind in used]
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys))


def _draw_bars(axes: Axes, timeline: Timeline, column_inches: float) -> None:
    unit = float(timeline.unit)
    for place, spans in enumerate(timeline.stages):
        for span in spans:
            columns = span.end - span.start
            axes.broken_barh(
                [(span.start * unit, columns * unit)],
                (place - 0.4, 0.8),
                facecolor=_COLOURS[span.kind],
                alpha=1 - 0.6 * span.chunk / timeline.chunks,
                edgecolor="white",
                linewidth=0.5,
            )
            if columns * column_inches >= _LABEL_INCHES:
                middle = (span.start + columns / 2) * unit
                axes.text(middle, place, str(span.micro_batch), ha="center", va="center", fontsize=7)
    stages = len(timeline.stages)
    axes.set_yticks(range(stages), [f"stage {place}" for place in range(stages)])
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_xlim(0, float(timeline.makespan))
    axes.set_xlabel("time")
