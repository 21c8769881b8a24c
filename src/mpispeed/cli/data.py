"""`mpispeed data`: token stores. No command needs torch or MPI, but for those that say so."""

from __future__ import annotations

import click

from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "show": ("mpispeed.cli.data_look", "show", "What is in a token store."),
    "verify": ("mpispeed.cli.data_look", "verify", "Compare a token store with its checksums."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def data() -> None:
    """Token stores: the data of training in one HDF5 file."""
