"""`mpispeed ckpt`: look at checkpoints. Needs neither torch nor MPI.

Exit codes: 0 fine, 2 usage or not found, 3 corrupt, 4 never committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click

from mpispeed.base.errors import CheckpointError
from mpispeed.base.units import format_bytes
from mpispeed.ckpt.errors import CorruptCheckpoint, IncompleteCheckpoint
from mpispeed.ckpt.tools import ls as listing
from mpispeed.ckpt.tools import show as showing


class _Failure(click.ClickException):
    """A failure with an exit code of its own: one line on stderr, or an object on stdout."""

    exit_code = 2

    def __init__(self, message: str, as_json: bool) -> None:
        super().__init__(message)
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
def _reported(as_json: bool) -> Iterator[None]:
    """Turn checkpoint errors into one line, or JSON, and the exit code of their kind."""
    try:
        yield
    except CorruptCheckpoint as failure:
        raise _CorruptFailure(str(failure), as_json) from failure
    except IncompleteCheckpoint as failure:
        raise _IncompleteFailure(str(failure), as_json) from failure
    except (CheckpointError, OSError) as failure:
        raise _Failure(str(failure), as_json) from failure


@click.group()
def ckpt() -> None:
    """List and describe checkpoints."""


@ckpt.command("ls")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(folder: Path, as_json: bool) -> None:
    """List the checkpoints in DIR; * marks the one that `latest` names."""
    with _reported(as_json):
        rows = listing.rows(folder)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = [
        (
            "*" if row["is_latest"] else "",
            row["tag"],
            "-" if row["step"] is None else str(row["step"]),
            format_bytes(row["bytes"]),
            row["created"] or "-",
            _layout_text(row["layout"]),
            row["status"],
        )
        for row in rows
    ]
    _print_table(("", "tag", "step", "size", "date", "layout", "status"), table)
    for row in rows:
        if row["status"] == "corrupt":
            click.echo(f"{row['tag']}: {row['problem']}", err=True)


@ckpt.command("show")
@click.argument("location", metavar="DIR[:TAG]")
@click.argument("pattern", required=False, default="")
@click.option("--state", "wants_state", is_flag=True, help="Show counters, schedules and client state.")
@click.option("--config", "wants_config", is_flag=True, help="Show the configuration of the run that saved.")
@click.option("--layout", "wants_layout", is_flag=True, help="Show the layout of the ranks that saved.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(location: str, pattern: str, wants_state: bool, wants_config: bool, wants_layout: bool, as_json: bool) -> None:
    """Describe a checkpoint: its tensors, or with an option its state, configuration or layout.

    TAG defaults to the latest. PATTERN selects names: shell-style, or a part of the name.
    """
    with _reported(as_json):
        found = showing.describe(location)
        content: dict[str, Any] = {"tag": found.tag, "step": found.manifest.global_step}
        if not (wants_state or wants_config or wants_layout):
            content["tensors"] = showing.rows(found.index, pattern)
        if wants_state:
            content["state"] = showing.state(found)
        if wants_config:
            content["config"] = _parsed(showing.config(found))
        if wants_layout:
            content["layout"] = found.manifest.layout
    if as_json:
        click.echo(json.dumps(content, indent=1))
        return
    if "tensors" in content:
        _print_tensors(content["tensors"])
    for part in ("state", "config", "layout"):
        if part in content:
            _print_part(part, content[part])


def _print_part(part: str, value: Any) -> None:
    if part == "config":
        click.echo(value if isinstance(value, str) else json.dumps(value, indent=2))
        return
    for line in _leaves(value, part):
        click.echo(line)


def _print_tensors(rows: Sequence[dict[str, Any]]) -> None:
    table = [
        (
            row["name"],
            "x".join(map(str, row["shape"])) or "scalar",
            row["dtype"],
            row["kind"],
            row["tp_kind"] or "-",
            "-" if row["group"] in (None, -1) else str(row["group"]),
            ",".join(row["slots"]) or "-",
            format_bytes(row["bytes"]),
        )
        for row in rows
    ]
    _print_table(("name", "shape", "dtype", "kind", "tp_kind", "group", "slots", "bytes"), table)
    click.echo(f"{len(rows)} rows, {format_bytes(sum(row['bytes'] for row in rows))}")


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A rich table on a terminal, plain columns elsewhere."""
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


def _layout_text(layout: dict[str, Any] | None) -> str:
    if not layout:
        return "-"
    axes = layout.get("axes", layout)
    items = axes.items() if isinstance(axes, dict) else [("axes", axes)]
    return " ".join(f"{name}={value}" for name, value in items if not isinstance(value, (dict, list)))


def _leaves(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    else:
        yield f"{path} = {json.dumps(value)}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
