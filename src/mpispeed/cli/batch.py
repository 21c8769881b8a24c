"""Common parts of `mpispeed sbatch` and `mpispeed qsub`: options, the run folder, checks, the file of a script."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mpispeed.base.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from mpispeed.launch.sites import Site
    from mpispeed.launch.submit import Checked

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--site", metavar="NAME|FILE", envvar="MPISPEED_SITE", help="A site's profile; default: MPISPEED_SITE."
    ),
    click.option("--nodes", "-N", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes."),
    click.option("--ntasks-per-node", type=click.IntRange(min=1), help="Ranks on each; default: the site's, else 1."),
    click.option("--cpus-per-task", type=click.IntRange(min=1), help="Cores of a rank; default: an equal share."),
    click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs of a node; ranks choose by local rank."),
    click.option("--time", "-t", "time_limit", default="", help="Time limit: minutes, or D-HH:MM:SS."),
    click.option("--account", "-A", default="", help="Default: the site's."),
    click.option("--job-name", "-J", default="", help="Default: the name of the script."),
    click.option(
        "--run-dir", type=click.Path(path_type=Path), help="For logs and reports; default: a new one in runs/."
    ),
    click.option("--dry-run", is_flag=True, help="Show the script and what the checks say; nothing is written."),
    click.option(
        "--output", "-o", type=click.Path(path_type=Path), help="Write the script to this file; not submitted."
    ),
)


def with_resources(command: _Command) -> _Command:
    """The command with the options that every batch system has."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fields_of(words: Sequence[str], asked: dict[str, Any], site: Site) -> dict[str, Any]:
    """The fields of a `Request` that these options give.

    Raises:
        ConfigError: as `run_folder`.
    """
    name = asked["job_name"] or Path(words[0]).stem
    return {
        "words": words,
        "run_folder": run_folder(asked["run_dir"], name, site),
        "work_folder": Path.cwd(),
        "job_name": name,
        "nodes": asked["nodes"],
        "ranks_per_node": asked["ntasks_per_node"],
        "cores_per_rank": asked["cpus_per_task"],
        "gpus_per_node": asked["gpus_per_node"],
        "memory_bytes": asked["mem"],
        "time": asked["time_limit"],
        "account": asked["account"],
        "flags": asked["flags"],
    }


def run_folder(asked: Path | None, name: str, site: Site) -> Path:
    """The folder of a run: the one that was asked for, or a new one.

    Raises:
        ConfigError: the site's scratch folder has variables that are not set.
    """
    if asked is not None:
        return asked.absolute()
    scratch = os.path.expandvars(site.scratch)
    if "$" in scratch:
        msg = f"{site.name}: scratch is {site.scratch!r}, and not all of its variables are set here; use --run-dir"
        raise ConfigError(msg)
    first = Path(scratch or ".").absolute() / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = first, 1
    while folder.exists():
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def show(text: str, checked: Checked, *, is_dry: bool) -> None:
    """Show the script if requested, and the results of its checks.

    Raises:
        UsageError: they found something.
    """
    if is_dry:
        click.echo(text, nl=False)
    for note in checked.notes:
        click.echo(note, err=True)
    if checked.problems:
        msg = "the batch script is not submitted:\n" + "\n".join(f"- {problem}" for problem in checked.problems)
        if not is_dry:
            msg += "\nsee the script with --dry-run"
        raise UsageError(msg)


def write(text: str, folder: Path, name: str, output: Path | None, submitter: str) -> Path | None:
    """Write a script to its run folder, and return it; or only to `output`, and say so.

    Raises:
        UsageError: it cannot be written.
    """
    target = output or folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)  # batch systems do not make the folder of a log
        target.write_text(text)
    except OSError as error:
        msg = f"the batch script cannot be written to {error.filename}: {error.strerror}"
        raise UsageError(msg) from error
    if output is None:
        return target
    click.echo(f"written to {output}; submit it with: {submitter} {output}")
    return None
