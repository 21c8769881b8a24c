"""`mpispeed ckpt`: commands on checkpoints. None of them needs MPI; those that only look or check need no torch."""

from __future__ import annotations

import click

from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "ls": ("mpispeed.cli.ckpt_look", "ls", "List the checkpoints of a folder."),
    "show": ("mpispeed.cli.ckpt_look", "show", "Describe a checkpoint."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def ckpt() -> None:
    """List, check, compare, convert and prune checkpoints."""
