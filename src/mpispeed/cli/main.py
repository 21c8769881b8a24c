"""The command `mpispeed`."""

from __future__ import annotations

import sys
from typing import Any

import click

from mpispeed.base.errors import MpispeedError
from mpispeed.base.version import VERSION
from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "run": ("mpispeed.cli.run", "run", "Start a training script on N ranks."),
    "env": ("mpispeed.cli.env", "env", "Variables of torch.distributed for a rank of srun or mpirun."),
    "sbatch": ("mpispeed.cli.sbatch", "sbatch", "Fill a batch script from a config and a plan, check it, submit it."),
    "scale": ("mpispeed.cli.scale", "scale", "Measure strong or weak scaling: table, CSV and picture."),
    "config": ("mpispeed.cli.config", "config", "Check and explain configuration files."),
    "elastic": ("mpispeed.cli.elastic", "elastic", "Show batch sizes and the numbers of ranks they divide among."),
    "plan": ("mpispeed.cli.plan", "plan", "Predict memory and traffic before anything starts; GO or NO-GO."),
    "ckpt": ("mpispeed.cli.ckpt", "ckpt", "List, check, compare, convert and prune checkpoints."),
    "drill": ("mpispeed.cli.drill", "drill", "Break a run on purpose: does it end, say why, and go on?"),
    "logs": ("mpispeed.cli.logs", "logs", "Put the logs of all ranks in one, in the order of time."),
    "compat": ("mpispeed.cli.compat", "compat", "Scripts and libraries that say `import deepspeed`."),
    "kernels": ("mpispeed.cli.kernels", "kernels", "List the CUDA kernels, compile them ahead of time."),
    "doctor": ("mpispeed.cli.doctor", "doctor", "Show what is usable on this machine, and why the rest is not."),
}


def _show_version(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"mpispeed {VERSION}")
        ctx.exit()


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
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
