"""Common parts of the checkpoint commands: failures with exit codes of their own, tables, options.

Exit codes: 0 fine, 1 a difference or a failed check, 2 usage or not found, 3 corrupt, 4 never committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import click

from mpispeed.base.errors import CheckpointError
from mpispeed.base.plain import printable
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Failure(click.ClickException):
    """A failure with an exit code of its own: one line on stderr, or an object on stdout."""

    exit_code = 2

    def __init__(self, message: str, as_json: bool) -> None:
        super().__init__(printable(message))
        self._as_json = as_json

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it."""
        if self._as_json:
            click.echo(json.dumps({"ok": False, "error": self.message}))
        else:
            super().show(file)


class _CorruptFailure(_Failure):
    exit_code = 3


class _IncompleteFailure(_Failure):
    exit_code = 4


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn checkpoint errors into one line, or JSON, and the exit code of their kind."""
    try:
        yield
    except CorruptCheckpoint as failure:
        raise _CorruptFailure(str(failure), as_json) from failure
    except IncompleteCheckpoint as failure:
        raise _IncompleteFailure(str(failure), as_json) from failure
    except BrokenPipeError:  # the reader of what is printed has enough: `| head`
        raise
    except (CheckpointError, OSError) as failure:
        raise _Failure(str(failure), as_json) from failure


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A rich table on a terminal, plain columns elsewhere; control characters in names are spelled out."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console  # rich is slow to import and of use on terminals only
        from rich.table import Table
        from rich.text import Text

        table = Table(*head, box=None)
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def say(line: str, *, err: bool = False) -> None:
    """Print one line; control characters from files cannot steer the terminal."""
    click.echo(printable(line), err=err)
