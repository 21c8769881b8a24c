"""`mpispeed logs trace`: the traced steps of a run, for a browser."""

from __future__ import annotations

from pathlib import Path

import click

from mpispeed.base.errors import UsageError
from mpispeed.cli.ckpt_report import say
from mpispeed.record.chrome import write_chrome
from mpispeed.record.errors import RecordError
from mpispeed.record.runs import Run, open_run

FILE = "trace.json"


@click.command("trace")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=FILE, show_default=True,
    help="The file, replaced if it is there.",
)  # fmt: skip
def trace(sources: tuple[Path, ...], output: Path) -> None:
    """Write the spans of a run record in Chrome's format, which https://ui.perfetto.dev shows.

    Each rank is a process; its threads are the main thread, channels of communication, and swap files.

    SOURCES are files, or folders with the files of a run's jobs. Runs have spans where the config's section "trace"
    is enabled.
    """
    export_spans(open_run(sources), output)


def export_spans(run: Run, output: Path) -> None:
    """Write the spans of a run, and say so.

    Raises:
        RecordError: it has none.
        UsageError: the file cannot be written.
    """
    spans = run.spans()
    if not len(spans):
        msg = f'{run.last.path} has no spans; runs have some once all steps of the config\'s section "trace" have ended'
        raise RecordError(msg)
    try:
        write_chrome(output, spans, run.names)
    except OSError as error:
        msg = f"{output} cannot be written: {error}"
        raise UsageError(msg) from error
    say(f"{output}: {len(spans)} spans of {len(set(spans['rank'].tolist()))} ranks; https://ui.perfetto.dev shows them")
