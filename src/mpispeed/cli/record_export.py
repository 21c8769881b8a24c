"""`mpispeed logs record export`: the points of a record, written by the sinks of monitors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable
from mpispeed.cli.ckpt_report import say
from mpispeed.cli.trace import FILE, export_spans
from mpispeed.record.errors import RecordError
from mpispeed.record.export import Target, feed, selected
from mpispeed.record.runs import Run, open_run
from mpispeed.record.summary import OWN

CHROME = "chrome"
_SETTINGS = ("project", "group", "team", "workspace", "experiment_name")
"""Keys of the sections of services that say where a run belongs."""
_MOST_SIGNS = 128
_OF_THIS_MACHINE = (
    "ENV_DETAILS", "ENV_HOST", "ENV_CPU", "ENV_GPU", "ENV_NETWORK", "ENV_DISK", "GIT_METADATA", "GIT_PATCH",
)  # fmt: skip
"""Facts that Comet's library logs unless it is told not to."""


def _csv(output: Path, _: Mapping[str, Any]) -> Target:
    from mpispeed.monitor.csv_sink import CsvSink  # monitors take seconds to import

    sink = CsvSink(output)
    return Target(lambda series, value, x, _: sink.write(series, value, x), sink.close)


def _tensorboard(output: Path, _: Mapping[str, Any]) -> Target:
    from mpispeed.monitor.tensorboard_sink import TensorBoardSink

    sink = TensorBoardSink(output)
    return Target(lambda series, value, x, seconds: sink.write(series, value, x, time=seconds), sink.close)


def _wandb(output: Path, section: Mapping[str, Any]) -> Target:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    from mpispeed.monitor.wandb_sink import WandbSink

    return _service(WandbSink(section, output))


def _comet(output: Path, section: Mapping[str, Any]) -> Target:
    # Nothing of this machine belongs to the run.
    os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
    os.environ.setdefault("COMET_LOGGING_CONSOLE", "error")
    for name in _OF_THIS_MACHINE:
        os.environ.setdefault(f"COMET_AUTO_LOG_{name}", "false")
    from mpispeed.monitor.comet_sink import CometSink

    return _service(CometSink({**section, "mode": "create"}, output))


def _service(sink: Any) -> Target:
    """The sink of a service, offline."""

    def close() -> None:
        sink.close()
        say(f"to be uploaded by: {sink.upload}")

    return Target(lambda series, value, x, seconds: sink.write(series, value, x, time=seconds), close)


@dataclass(frozen=True, slots=True)
class _Form:
    """A format.

    Attributes:
        create: makes its sink in a folder, with the section of the run's config.
        section: name of this section.
        package: that it needs.
        is_by_series: one series follows the other.
    """

    create: Callable[[Path, Mapping[str, Any]], Target]
    section: str
    package: str | None = None
    is_by_series: bool = False


_FORMS: Mapping[str, _Form] = {
    "csv": _Form(_csv, "csv_monitor", is_by_series=True),
    "tensorboard": _Form(_tensorboard, "tensorboard", "tensorboard"),
    "wandb": _Form(_wandb, "wandb", "wandb"),
    "comet": _Form(_comet, "comet", "comet_ml"),
}


@click.command("export")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--to", "form", required=True, type=click.Choice([*_FORMS, CHROME]), help="What to write.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A folder that is new or empty.")
@click.option("--series", "patterns", multiple=True, help="Names of series: shell-style, or a part of the name.")
@click.option("--all", "wants_all", is_flag=True, help="Also what no monitor gets: times, memory, traffic of ranks.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose points.")
@click.option("--project", help="Of wandb and comet; default: that of the run's config.")
def export(
    sources: tuple[Path, ...],
    form: str,
    output: Path,
    patterns: tuple[str, ...],
    wants_all: bool,
    rank: int,
    project: str | None,
) -> None:
    """Write the points of a run as the monitors of the run would have written them; wandb and comet: to upload later.

    These are the series that monitors get; with --all, --rank or --series also others. chrome: spans of traced steps.
    """
    run = open_run(sources)
    if form == CHROME:
        _write_spans(run, output)
        return
    names = selected([info.name for info in run.series() if rank in info.ranks], patterns)
    if not (wants_all or patterns or rank):
        names = [name for name in names if not name.startswith(OWN)]
    if not names:
        msg = f"{run.last.path} has no points of rank {rank} that are asked for"
        raise RecordError(msg)
    section = settings_of(run.facts, _FORMS[form].section) | ({} if project is None else {"project": project})
    count = _write(run, _FORMS[form], output, section, names, rank)
    say(f"{output}: {count} points of {len(names)} series")


def _write_spans(run: Run, output: Path) -> None:
    _check_empty(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        msg = f"{output} cannot be made: {failure}"
        raise UsageError(msg) from failure
    export_spans(run, output / FILE)


def settings_of(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Names in a section of the recorded config, and the interval of points; of others only what is plain."""
    config = facts.get("config")
    section = config.get(name) if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return {}
    found = {key: section[key] for key in _SETTINGS if isinstance(section.get(key), str)}
    found = {key: value for key, value in found.items() if value.isprintable() and 0 < len(value) <= _MOST_SIGNS}
    interval = section.get("samples_log_interval")
    is_count = isinstance(interval, int) and not isinstance(interval, bool) and 0 < interval < 1 << 40
    return {**found, "samples_log_interval": interval} if is_count else found


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        msg = f"{output} is there and no empty folder; points would be added to what it has"
        raise UsageError(msg)


def _write(run: Run, form: _Form, output: Path, section: Mapping[str, Any], names: list[str], rank: int) -> int:
    if form.package is not None and find_spec(form.package) is None:
        msg = f"this needs the Python package {form.package}; install it (pip install {form.package})"
        raise UsageError(msg)
    try:
        _check_empty(output)
        return feed(run, form.create(output, section), names, rank=rank, by_series=form.is_by_series)
    except UsageError:
        raise
    except Exception as failure:  # of the libraries of services any
        why = str(failure) if isinstance(failure, (OSError, ValueError)) else f"{type(failure).__name__}: {failure}"
        msg = f"{output} cannot be written: {printable(why, 300)}"
        raise UsageError(msg) from failure
