"""`mpispeed ckpt prune` and `latest`. They need neither torch nor MPI."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mpispeed.base.units import format_bytes
from mpispeed.ckpt.tools import keep
from mpispeed.cli.ckpt_report import as_json_option, print_table, reported, say


@click.command("prune")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--keep-last", type=click.IntRange(min=1), help="Keep so many of the newest tags, remove older ones.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep tags whose step is a multiple of this too.")
@click.option("--recover", is_flag=True, help="Restore tags whose overwriting was interrupted. Not during a save.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@as_json_option
def prune(
    folder: Path, keep_last: int | None, keep_every: int | None, recover: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove old checkpoints of DIR and what killed saves left behind.

    Without --keep-last all complete checkpoints stay. The tag that `latest` names always stays.
    """
    if keep_every and not keep_last:
        msg = "--keep-every says what stays beside the newest tags; pass --keep-last too"
        raise click.UsageError(msg)
    with reported(as_json):
        rows = keep.prune(
            folder, keep_last=keep_last or 0, keep_every=keep_every or 0, recover=recover, dry_run=dry_run
        )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = [
        (row["action"], row["folder"], "-" if row["step"] is None else str(row["step"]), format_bytes(row["bytes"]),
         row["reason"])
        for row in rows
    ]  # fmt: skip
    print_table(("action", "folder", "step", "size", "reason"), table)
    freed = format_bytes(sum(row["bytes"] for row in rows if row["action"] == "remove"))
    say(f"{freed} {'would be' if dry_run else 'were'} freed")


@click.command("latest")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--set", "tag", metavar="TAG", help="Make `latest` name this tag, which has to be complete.")
@as_json_option
def latest(folder: Path, tag: str | None, as_json: bool) -> None:
    """Print the tag that `latest` of DIR names, or set it."""
    with reported(as_json):
        if tag is not None:
            keep.set_latest(folder, tag)
        found = keep.latest(folder)
    say(json.dumps({"tag": found}) if as_json else found)
