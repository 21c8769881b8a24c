"""`mpispeed logs record export`: the points of a record, written by the sinks of monitors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable
from mpispeed.cli.ckpt_report import say
from mpispeed.record.errors import RecordError
from mpispeed.record.export import Target, feed, selected
from mpispeed.record.runs import Run, open_run
from mpispeed.record.summary import OWN


def _csv(output: Path) -> Target:
    from mpispeed.monitor.csv_sink import CsvSink  # monitors take seconds to import

    sink = CsvSink(output)
    return Target(lambda series, value, x, _: sink.write(series, value, x), sink.close)


def _tensorboard(output: Path) -> Target:
    from mpispeed.monitor.tensorboard_sink import TensorBoardSink

    sink = TensorBoardSink(output)
    return Target(lambda series, value, x, seconds: sink.write(series, value, x, time=seconds), sink.close)


@dataclass(frozen=True, slots=True)
class _Form:
    """A format: a function that makes its sink in a folder, the package it needs, whether series follow in turn."""

    create: Callable[[Path], Target]
    package: str | None = None
    is_by_series: bool = False


_FORMS: Mapping[str, _Form] = {
    "csv": _Form(_csv, is_by_series=True),
    "tensorboard": _Form(_tensorboard, "tensorboard"),
}


@click.command("export")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--to", "form", required=True, type=click.Choice(list(_FORMS)), help="What to write.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A folder that is new or empty.")
@click.option("--series", "patterns", multiple=True, help="Names of series: shell-style, or a part of the name.")
@click.option("--all", "wants_all", is_flag=True, help="Also what no monitor gets: times, memory, traffic of ranks.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose points.")
def export(
    sources: tuple[Path, ...], form: str, output: Path, patterns: tuple[str, ...], wants_all: bool, rank: int
) -> None:
    """Write the points of a run as the monitors of the run would have written them.

    These are the series that monitors get; with --all, --rank or --series also others.
    """
    run = open_run(sources)
    names = selected([info.name for info in run.series() if rank in info.ranks], patterns)
    if not (wants_all or patterns or rank):
        names = [name for name in names if not name.startswith(OWN)]
    if not names:
        msg = f"{run.last.path} has no points of rank {rank} that are asked for"
        raise RecordError(msg)
    count = _write(run, _FORMS[form], output, names, rank)
    say(f"{output}: {count} points of {len(names)} series")


def _write(run: Run, form: _Form, output: Path, names: list[str], rank: int) -> int:
    if form.package is not None and find_spec(form.package) is None:
        msg = f"this needs the Python package {form.package}; install it (pip install {form.package})"
        raise UsageError(msg)
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            msg = f"{output} is there and no empty folder; points would be added to what it has"
            raise UsageError(msg)
        return feed(run, form.create(output), names, rank=rank, by_series=form.is_by_series)
    except (OSError, ValueError) as failure:
        msg = f"{output} cannot be written: {printable(str(failure), 300)}"
        raise UsageError(msg) from failure
