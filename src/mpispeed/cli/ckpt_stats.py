"""`mpispeed ckpt stats`. It needs neither torch nor MPI; matplotlib only for a picture."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import CheckpointError
from mpispeed.base.plain import printable
from mpispeed.ckpt.read.reader import open_reader
from mpispeed.ckpt.tools import show, stats, stats_drift
from mpispeed.cli.ckpt_report import as_json_option, print_table, reported, say

_MOST_BINS = 2000
#: so many tensors or fewer get their histogram bar by bin
_FEW = 4
_BAR_SIGNS = 50
_SPARKS = "▁▂▃▄▅▆▇█"
_NUMBERS = ("count", "min", "max", "mean", "std", "rms", "zeros", "nan", "inf")
_CHANGES = ("rms", "previous_change", "previous_cosine", "first_change", "first_cosine")
_CHANGE_HEADS = ("rms", "change", "cosine", "since first", "cosine")
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("stats")
@click.argument("location", metavar="DIR[:TAG]")
@click.argument("pattern", required=False, default="")
@click.option("--slots", default="", help="Slots, with commas; all for everything. Default: the weights.")
@click.option("--bins", type=click.IntRange(1, _MOST_BINS), default=stats.DEFAULT_BINS, show_default=True)
@click.option("--tags", "wanted", multiple=True, help="Tags to compare, with commas, in this order; DIR has them.")
@click.option("--all-tags", is_flag=True, help="Compare all complete tags of DIR, by step.")
@click.option("--csv", "csv_file", type=_FILE, help="Write the rows; with several tags, those of the comparison.")
@click.option("--html", "html_file", type=_FILE, help="Write one page that needs no network.")
@click.option("--png", "png_file", type=_FILE, help="Write a picture of at most 24 histograms; needs matplotlib.")
@as_json_option
def stats_command(
    location: str,
    pattern: str,
    slots: str,
    bins: int,
    wanted: tuple[str, ...],
    all_tags: bool,
    csv_file: Path | None,
    html_file: Path | None,
    png_file: Path | None,
    as_json: bool,
) -> None:
    """Statistics and histograms of the tensors of a checkpoint; with several tags, how far the weights moved.

    TAG defaults to the latest; with several tags the statistics are of the last. PATTERN selects names: shell-style,
    or a part of the name.
    """
    with reported(as_json):
        report = _report(location, pattern, _split(slots), bins, wanted, all_tags)
        if csv_file:
            _write_csv(csv_file, report)
        if html_file:
            from mpispeed.ckpt.tools import stats_html  # of use for this option only

            html_file.write_text(stats_html.page(report), encoding="utf-8")
        if png_file:
            from mpispeed.ckpt.tools import stats_plot  # of use for this option only

            stats_plot.write_png(png_file, report)
    if as_json:
        click.echo(json.dumps(report, indent=1, allow_nan=False))
        return
    _print_stats(report)
    if report["drift"]:
        _print_drift(report["drift"])
    for line in report["skipped"]:
        say(f"not compared: {line}", err=True)


def _report(
    location: str, pattern: str, slots: Sequence[str], bins: int, wanted: Sequence[str], all_tags: bool
) -> dict[str, Any]:
    """Everything to print or write: tag, step, params, layers, drift and skipped."""
    drift, skipped = None, list[str]()
    folder, tag = show.split_location(location)
    if wanted or all_tags:
        if tag is not None or (wanted and all_tags):
            msg = "several tags are chosen in one way: by --tags or by --all-tags, and DIR without a tag"
            raise CheckpointError(msg)
        chosen = [name for text in wanted for name in _tags_in(folder, text)]
        if all_tags:
            chosen, skipped = stats_drift.complete_tags(folder)
        if not chosen:
            msg = f"--tags {','.join(wanted)!r} names no tag"
            raise CheckpointError(msg)
        drift, tag = stats_drift.drift(folder, chosen, pattern), chosen[-1]
    with open_reader(folder, tag) as reader:
        found = stats.statistics(reader, pattern, slots, bins, may_be_empty=drift is not None)
        return {"tag": reader.tag, "step": reader.global_step} | found | {"drift": drift, "skipped": skipped}


def _tags_in(folder: Path, text: str) -> list[str]:
    """The tags a text names: one, if there is one of this name, as tags may have commas."""
    try:
        if (folder / text).is_dir():
            return [text]
    except OSError:  # too long for one name
        pass
    return _split(text)


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _write_csv(path: Path, report: Mapping[str, Any]) -> None:
    drift = report["drift"]
    rows = drift["params"] if drift else [_flat(row) for row in report["params"]]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without lists: the shape as 2x3, the histogram as its counts between min and max."""
    counts = row["histogram"]["counts"] if row["histogram"] else []
    return dict(row) | {"shape": "x".join(map(str, row["shape"])), "histogram": " ".join(map(str, counts))}


def _print_stats(report: Mapping[str, Any]) -> None:
    rows, layers = report["params"], report["layers"]
    if not rows:
        return
    table = [
        (
            printable(row["name"]),
            row["slot"],
            *_cells(row, _NUMBERS),
            _cell(row["update_ratio"]),
            _sparks(row["histogram"]),
        )
        for row in rows
    ]
    print_table(("name", "slot", *_NUMBERS, "update", "histogram (log)"), table)
    if len(layers) < len(rows):
        click.echo()
        table = [(printable(row["layer"]), row["slot"], str(row["tensors"]), *_cells(row, _NUMBERS)) for row in layers]
        print_table(("layer", "slot", "tensors", *_NUMBERS), table)
    if report["experts"]:
        click.echo()
        table = [
            (
                printable(row["layer"]),
                f"{row['expert']} of {row['experts']}",
                row["slot"],
                str(row["tensors"]),
                *_cells(row, _NUMBERS),
            )
            for row in report["experts"]
        ]
        print_table(("layer", "expert", "slot", "tensors", *_NUMBERS), table)
    if len(rows) <= _FEW:
        for row in rows:
            _print_bars(row)


def _print_bars(row: Mapping[str, Any]) -> None:
    """One line per bin: where it starts, its count, and a bar as long as the count says."""
    histogram = row["histogram"]
    if histogram is None:
        return
    low, high, counts = float(histogram["low"]), float(histogram["high"]), histogram["counts"]
    click.echo(f"\n{printable(row['name'])} {row['slot']}: {low:.6g} to {high:.6g}")
    digits, bins = len(str(max(counts))), len(counts)
    for place, count in enumerate(counts):
        edge = low * (1 - place / bins) + high * (place / bins)
        bar = "█" * round(_BAR_SIGNS * count / max(counts))
        say(f"{edge:>11.4g}  {count:>{digits}}  {bar or ('▏' if count else '')}".rstrip())


def _print_drift(drift: Mapping[str, Any]) -> None:
    click.echo("\nweights, against the tag before and the first tag:")
    several = drift["tags"][1:] or drift["tags"]
    shown = {row["tag"] for row in several}
    layers = [row for row in drift["layers"] if row["tag"] in shown]
    table = [(row["tag"], str(row["step"]), printable(row["layer"]), *_cells(row, _CHANGES)) for row in layers]
    print_table(("tag", "step", "layer", *_CHANGE_HEADS), table)
    click.echo()
    rows = [row for row in drift["params"] if row["tag"] in shown]
    table = [
        (row["tag"], str(row["step"]), printable(row["name"]), *_cells(row, _CHANGES), printable(row["note"]))
        for row in rows
    ]
    print_table(("tag", "step", "name", *_CHANGE_HEADS, "note"), table)


def _cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    return [_cell(row[key]) for key in keys]


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _sparks(histogram: Mapping[str, Any] | None) -> str:
    """A character per bin, as high as the logarithm of its count; neighbours are joined if there are too many."""
    if histogram is None:
        return ""
    counts = histogram["counts"]
    apart = math.ceil(len(counts) / stats.DEFAULT_BINS)
    joined = [sum(counts[start : start + apart]) for start in range(0, len(counts), apart)]
    top = math.log1p(max(joined))
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(last * math.log1p(count) / top)] if count else " " for count in joined)
