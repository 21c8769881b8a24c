"""The command group: sub-commands are a table and are imported when they are used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from mpispeed.base.errors import MpispeedError

# name -> (module, attribute, short help); the help stands here so that `mpispeed --help` imports no sub-command
COMMANDS = {
    "run": ("mpispeed.cli.run", "run", "Start a training script on N ranks."),
    "config": ("mpispeed.cli.config", "config", "Check and explain configuration files."),
    "plan": ("mpispeed.cli.plan", "plan", "Predict memory and traffic before anything starts; GO or NO-GO."),
    "ckpt": ("mpispeed.cli.ckpt", "ckpt", "List and inspect checkpoints."),
    "doctor": ("mpispeed.cli.doctor", "doctor", "Show what is usable on this machine, and why the rest is not."),
}


class LazyGroup(click.Group):
    """A group that imports a sub-command only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the sub-commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the sub-command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of sub-commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


def _show_version(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        from importlib.metadata import version  # costs a search of the installed files

        click.echo(f"mpispeed {version('mpispeed')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Training of large models over MPI, driven by DeepSpeed-style JSON."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: an error this library raises on purpose is one line on stderr and exit code 2."""
    try:
        return cli.main(args=arguments, prog_name="mpispeed")
    except MpispeedError as error:
        click.echo(f"mpispeed: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
