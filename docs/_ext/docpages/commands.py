"""The command line: a page per command with its arguments and options, as click has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from docpages.markdown import code, escaped, fence, table, toctree
from mpispeed.cli.main import COMMANDS, cli

FOLDER = "reference/commands"


def pages() -> Iterator[tuple[str, str]]:
    """(page, text) of all commands and their index."""
    context = click.Context(cli, info_name="mpispeed")
    rows = [(f"[`mpispeed {name}`](commands/{name}.md)", escaped(COMMANDS[name][2])) for name in COMMANDS]
    head = ["# Command line", "", "Every command with its options, as `--help` shows them.", ""]
    yield (
        FOLDER,
        "\n".join([*head, *table(("command", "what"), rows), *toctree(f"{FOLDER}/{name}" for name in COMMANDS)]),
    )
    for name in COMMANDS:
        command = cli.get_command(context, name)
        if command is not None:
            yield f"{FOLDER}/{name}", "\n".join(section(command, click.Context(command, context, name), 1))


def section(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    """Heading, usage, text and options of a command, then its sub-commands."""
    yield f"{'#' * level} `{context.command_path}`\n"
    usage = " ".join(command.collect_usage_pieces(context))
    yield from fence(f"{context.command_path} {usage}", "console")
    yield from help_text(command.help or "")
    rows = [row for parameter in command.get_params(context) if (row := option(parameter, context))]
    if rows:
        yield from table(("option", "meaning"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from section(inner, click.Context(inner, context, name), level + 1)


def help_text(text: str) -> Iterator[str]:
    """The help of a command: paragraphs are joined, those behind a backspace stay as they are."""
    for paragraph in inspect.cleandoc(text.partition("\f")[0]).split("\n\n"):
        if paragraph.startswith("\b"):
            yield from fence(paragraph.removeprefix("\b").strip("\n"), "text")
        elif paragraph.strip():
            yield escaped(" ".join(paragraph.split())) + "\n"


def option(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    """The row of an option; None for what is hidden, and for arguments without a text, which the usage names."""
    record = parameter.get_help_record(context)
    if record is None or not record[1]:
        return None
    names, meaning = record
    return code(names), escaped(meaning)
