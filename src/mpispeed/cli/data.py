"""`mpispeed data`: commands on token stores."""

from __future__ import annotations

import click

from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "build": ("mpispeed.cli.data_build", "build", "Build a token store from texts, on all ranks."),
    "import": ("mpispeed.cli.data_build", "import_", "Build a token store from files that have tokens."),
    "merge": ("mpispeed.cli.data_build", "merge", "Join token stores to one."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def data() -> None:
    """Build, merge and look at token stores."""
