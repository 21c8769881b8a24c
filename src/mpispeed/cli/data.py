"""`mpispeed data`: commands on token stores."""

from __future__ import annotations

import click

from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "build": ("mpispeed.cli.data_build", "build", "Build a token store from texts, on all ranks."),
    "import": ("mpispeed.cli.data_build", "import_", "Build a token store from files that have tokens."),
    "show": ("mpispeed.cli.data_look", "show", "Show what is in a token store."),
    "verify": ("mpispeed.cli.data_look", "verify", "Compare a token store with its checksums."),
    "analyze": ("mpispeed.cli.data_analyze", "analyze", "Measure the samples of a token store, on all ranks."),
    "merge": ("mpispeed.cli.data_build", "merge", "Join token stores to one."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def data() -> None:
    """Build, merge and look at token stores."""
