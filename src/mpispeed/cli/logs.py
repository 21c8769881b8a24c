"""`mpispeed logs`: logs of ranks, as one file, and records of runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mpispeed.base.errors import UsageError
from mpispeed.cli.lazy import LazyGroup
from mpispeed.logs.merge import MERGED, find_logs, merge_logs, merged_lines

COMMANDS = {
    "merge": ("mpispeed.cli.logs", "merge", "Put the logs of all ranks in one file, in the order of time."),
    "trace": ("mpispeed.cli.trace", "trace", "Write the traced steps of a run for a browser, in Chrome's format."),
    "record": ("mpispeed.cli.record", "record", "Show, draw, compare and export the records of runs."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def logs() -> None:
    """Logs of ranks in the folder of a run, and records of runs."""


@click.command("merge")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help=f"By default FOLDER/{MERGED}.")
@click.option("--show", is_flag=True, help="Write to stdout instead.")
def merge(folder: Path, output: Path | None, show: bool) -> None:
    """Put rank-*.log of FOLDER in one file, in the order of time.

    Each line begins with its time and its ranks; what several ranks say alike within seconds stands there once.
    """
    found = find_logs(folder)
    if not found:
        msg = f"{folder} has no rank-*.log; ranks write them where MPISPEED_RUN_DIR (mpispeed run --run-dir) points"
        raise UsageError(msg)
    if show:
        for line in merged_lines(found):
            sys.stdout.write(line + "\n")
        return
    try:
        count = merge_logs(folder, output)
    except OSError as error:
        msg = f"the logs of {folder} cannot be merged: {error}"
        raise UsageError(msg) from error
    click.echo(f"{count} logs in {output or folder / MERGED}")
