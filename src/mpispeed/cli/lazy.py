"""Command groups with a table of sub-commands that are imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

#: name -> (module, attribute, short help); the help stands in the table so that showing it imports no sub-command
Table = Mapping[str, tuple[str, str, str]]


class LazyGroup(click.Group):
    """A group that imports a sub-command only to run it or to show its own help."""

    def __init__(self, *args: Any, table: Table, **settings: Any) -> None:
        """Args: `table`: the sub-commands; the rest goes to click."""
        super().__init__(*args, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the sub-commands, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the sub-command."""
        if cmd_name not in self._table:
            return None
        module, attribute, _ = self._table[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of sub-commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in self._table.items()])
