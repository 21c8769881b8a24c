"""`mpispeed stage`: the environment of this Python as one file, and its folders on nodes.

Exit codes: 0 done, 2 it cannot be done; the message says why.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpispeed.base.errors import StagingError
from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes

if TYPE_CHECKING:
    from mpispeed.staging.pack import Archive


@click.group()
def stage() -> None:
    """Pack the environment into one file, from which the nodes of a job start (`mpispeed run --stage-env`)."""


@stage.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder; by default one in the environment.")
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out such paths, as in venv/*/torch/include/*; kept for later packs.",
)
@click.option("--again", is_flag=True, help="Pack anew, also if the environment seems to be the same.")
def pack(output: Path | None, exclude: tuple[str, ...], *, again: bool) -> None:
    """Pack the environment of this Python, unless its archive is there already."""
    from mpispeed.staging.pack import pack as packed

    _show(packed(output, again=again, exclude=exclude or None))


@stage.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder; by default one in the environment.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--files", is_flag=True, help="List the files in the archive.")
def show(output: Path | None, *, as_json: bool, files: bool) -> None:
    """Show the archive of this environment."""
    from mpispeed.staging.pack import default_folder, find_packed

    folder = output or default_folder()
    archive = find_packed(folder)
    if archive is None:
        msg = f"there is no archive in {folder}; make one with `mpispeed stage pack`"
        raise StagingError(msg)
    if as_json:
        click.echo(json.dumps({**asdict(archive), "path": str(archive.path)}))
    elif files:
        _list(archive)
    else:
        _show(archive)


def _show(archive: Archive) -> None:
    click.echo(f"{archive.path}\n  of {archive.source}")
    click.echo(f"  {archive.files} files, {format_bytes(archive.size)}; unpacked {format_bytes(archive.room)}")
    click.echo(f"  seal {archive.seal}")


def _list(archive: Archive) -> None:
    from mpispeed.staging.archive import Seal, read_manifest

    with archive.path.open("rb") as file:
        for member in read_manifest(file.fileno(), Seal.parse(archive.seal)).members:
            click.echo(f"{member.size:>12} {member.sha256[:12]} {printable(member.path)}")


@stage.command()
@click.option("--stage-dir", type=click.Path(path_type=Path), help="Place to look at; by default all of this node.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
def clean(stage_dir: Path | None, *, dry_run: bool) -> None:
    """Remove from this node what ended jobs of this user have left; what a process uses stays."""
    from mpispeed.staging.folders import left_over, remove
    from mpispeed.staging.places import candidates

    for path in left_over(candidates(str(stage_dir or ""))):
        if not dry_run:
            remove(path)
        click.echo(path)


@stage.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the archive.")
@click.option("--stage-dir", default="", help="Folder of the nodes; by default the first place with room.")
def begin(output: Path | None, stage_dir: str) -> None:
    """Unpack the environment on all nodes of this SLURM job, or here; print lines for a shell to evaluate.

    The lines set `staged_python` and the variables that processes of it need. `mpispeed stage end` removes it again.
    """
    from mpispeed.launch.options import Wishes
    from mpispeed.launch.staged import ended_by_exit, job_number, lease_of, reach_of
    from mpispeed.staging.folders import name_for
    from mpispeed.staging.pack import pack as packed
    from mpispeed.staging.spread import Staged

    with ended_by_exit():
        archive = packed(output)
        folder = reach_of(Wishes(), None, "auto", os.environ).stage(
            archive, name_for(job_number(os.environ)), stage_dir, lease_of(os.environ, is_held=False)
        )
    found = Staged(folder, archive)
    for name, value in found.variables(os.environ).items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(f"staged_python={shlex.quote(found.python)}")


@stage.command()
@click.argument("folder", type=click.Path(path_type=Path))
def end(folder: Path) -> None:
    """Remove FOLDER, which `mpispeed stage begin` has made, from all nodes of this SLURM job, or from here."""
    from mpispeed.launch.options import Wishes
    from mpispeed.launch.staged import reach_of

    reach_of(Wishes(), None, "auto", os.environ).end(folder)
