"""The command `mpispeed`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import MpispeedError
from mpispeed.base.version import VERSION
from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "run": ("mpispeed.cli.run", "run", "Start a training script on N ranks."),
    "tune": ("mpispeed.cli.tune", "tune", "Find fast settings for a script by short trials in one job."),
    "generate": ("mpispeed.cli.generate", "generate", "Answer the prompts of a file with a model, on all ranks."),
    "env": ("mpispeed.cli.env", "env", "Variables of torch.distributed for a rank of srun or mpirun."),
    "sbatch": ("mpispeed.cli.sbatch", "sbatch", "Fill a batch script from a config and a plan, check it, submit it."),
    "stage": ("mpispeed.cli.stage", "stage", "Pack the environment into one file for the nodes of a job."),
    "scale": ("mpispeed.cli.scale", "scale", "Measure strong or weak scaling: table, CSV and picture."),
    "config": ("mpispeed.cli.config", "config", "Check and explain configuration files."),
    "elastic": ("mpispeed.cli.elastic", "elastic", "Show batch sizes and the numbers of ranks they divide among."),
    "plan": ("mpispeed.cli.plan", "plan", "Predict memory and traffic before anything starts; GO or NO-GO."),
    "data": ("mpispeed.cli.data", "data", "Build, check and merge token stores."),
    "ckpt": ("mpispeed.cli.ckpt", "ckpt", "List, check, compare, convert and prune checkpoints."),
    "drill": ("mpispeed.cli.drill", "drill", "Break a run on purpose: does it end, say why, and go on?"),
    "logs": ("mpispeed.cli.logs", "logs", "Logs of all ranks in the order of time; records of runs."),
    "compat": ("mpispeed.cli.compat", "compat", "Scripts and libraries that say `import deepspeed`."),
    "kernels": ("mpispeed.cli.kernels", "kernels", "List the CUDA kernels, compile them ahead of time."),
    "doctor": ("mpispeed.cli.doctor", "doctor", "Show what is usable on this machine, and why the rest is not."),
}


_OWN_OPTIONS = ("-h", "--help", "--version")


class _RunsScripts(LazyGroup):
    """The commands; `run` may be left out before its options and before a script, as with DeepSpeed's launcher."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, with `run` before them where it is meant."""
        return super().parse_args(ctx, ["run", *args] if _is_start(args) else args)


def _is_start(args: list[str]) -> bool:
    first = args[0] if args else ""
    if first.startswith("-"):
        return first not in _OWN_OPTIONS
    return first not in COMMANDS and first.endswith(".py") and Path(first).is_file()


def _show_version(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"mpispeed {VERSION}")
        ctx.exit()


@click.group(cls=_RunsScripts, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
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
        world = sys.modules.get("mpispeed.mesh.world")
        if world is not None and world.is_started():
            raise  # a rank of a job: its hooks show one error for all, and end the others
        click.echo(f"mpispeed: {error}", err=True)
        sys.exit(2)


def deepspeed_main(arguments: list[str] | None = None) -> Any:
    """Entry point for an executable called deepspeed: its words are those of `mpispeed run --torch-env`.

    DeepSpeed's launcher sets the variables of torch, and libraries count ranks by them.

    No such executable is installed with this package, since another package of that name may be there.

    Args:
        arguments: the words; None takes those of the process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    asks_version = words[:1] in (["-v"], ["-V"], ["--version"])
    return main(["--version"] if asks_version else ["run", "--torch-env", *words])


if __name__ == "__main__":
    main()
