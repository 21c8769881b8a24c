"""`mpispeed ckpt`: commands on checkpoints. None of them needs MPI; those that only look or check need no torch."""

from __future__ import annotations

import click

from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "ls": ("mpispeed.cli.ckpt_look", "ls", "List the checkpoints of a folder."),
    "show": ("mpispeed.cli.ckpt_look", "show", "Describe a checkpoint."),
    "import": ("mpispeed.cli.ckpt_import", "import_", "Take over a checkpoint of DeepSpeed, torch or safetensors."),
    "verify": ("mpispeed.cli.ckpt_check", "verify", "Check that a checkpoint is what was saved."),
    "diff": ("mpispeed.cli.ckpt_check", "diff", "Tell in what two checkpoints differ."),
    "tree": ("mpispeed.cli.ckpt_check", "tree", "List the HDF5 objects of the files."),
    "export": ("mpispeed.cli.ckpt_move", "export", "Write the weights for other programs."),
    "reshape": ("mpispeed.cli.ckpt_move", "reshape", "Copy with elements in another number of files."),
    "prune": ("mpispeed.cli.ckpt_keep", "prune", "Remove old checkpoints and left-over folders."),
    "latest": ("mpispeed.cli.ckpt_keep", "latest", "Show or set the tag that is loaded by default."),
    "stats": ("mpispeed.cli.ckpt_stats", "stats_command", "Statistics, histograms and drift of weights."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def ckpt() -> None:
    """List, check, compare, convert and prune checkpoints."""
