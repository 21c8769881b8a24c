"""`mpispeed config`: check a configuration file, explain its values, print the file format."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import click

from mpispeed.base.errors import ConfigError
from mpispeed.base.plain import printable

# pydantic is imported by the commands, so that `mpispeed --help` stays fast.


@click.group(name="config", help="Check and explain configuration files.")
def config() -> None:
    """Group of the commands below."""


def _leave(error: ConfigError, as_json: bool = False, where: str = "") -> NoReturn:
    """Report the mistakes on stderr, with `as_json` also as a verdict on stdout, and exit with 2."""
    first, *listed = str(error).splitlines()
    click.echo(str(error), err=True)
    if as_json:
        click.echo(
            json.dumps(
                {"ok": False, "problems": [line.strip() for line in listed] or [first.removeprefix(f"{where}: ")]}
            )
        )
    sys.exit(2)


def _load(source: str, as_json: bool = False, ranks: int | None = None) -> Any:
    from mpispeed.config import load_for_run

    try:
        loaded = load_for_run(source, ranks)
    except ConfigError as error:
        _leave(error, as_json, source)
    for warning in loaded.warnings:
        click.echo(f"{printable(loaded.where)}: warning: {printable(warning)}", err=True)
    return loaded


@config.command()
@click.argument("file")
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), help="Check batch sizes and groups of experts for this many ranks too."
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def check(file: str, ranks: int | None, as_json: bool) -> None:
    """Say ok, or list all mistakes of FILE and exit with 2."""
    loaded = _load(file, as_json, ranks)
    click.echo(json.dumps({"ok": True, "warnings": loaded.warnings}) if as_json else "ok")


@config.command()
@click.argument("file")
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of data-parallel ranks.")
@click.option("--set-only", is_flag=True, help="Leave out values that are plain defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of {path, value, origin}.")
def explain(file: str, ranks: int, set_only: bool, as_json: bool) -> None:
    """Print every resolved value of FILE and where it came from: FILE, a default, or the file of the site."""
    from mpispeed.config import explain as explain_rows

    loaded = _load(file)
    try:
        rows = explain_rows(loaded, ranks)
    except ConfigError as error:
        _leave(ConfigError(f"{printable(loaded.where)}: {error}"))
    if set_only:
        rows = [row for row in rows if row.origin != "default"]
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=1, default=repr))
        return
    cells = [(printable(row.path), json.dumps(row.value, default=repr), row.origin) for row in rows]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in (0, 1)]
    for path, value, origin in cells:
        click.echo(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


@config.command()
@click.option("--markdown", is_flag=True, help="Print the reference page instead.")
@click.option("--inference", is_flag=True, help="The settings of init_inference, not those of training.")
def schema(markdown: bool, inference: bool) -> None:
    """Print the file format as JSON Schema."""
    from mpispeed.config.schema import inference_page, inference_schema, reference_page
    from mpispeed.config.schema import schema as training_schema

    page, table = (inference_page, inference_schema) if inference else (reference_page, training_schema)
    click.echo(page() if markdown else json.dumps(table(), indent=1), nl=not markdown)
