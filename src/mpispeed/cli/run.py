"""`mpispeed run`: start a training script on N ranks with the MPI or SLURM that is there."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mpispeed.base.errors import UsageError

_WITHOUT_FOLDER = "import sys; del sys.path[0]; from mpi4py.run import main; main()"


def runner(version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """Python's flags for mpi4py's runner, which ends all ranks when one fails: the others would wait for ever.

    Files of the working folder must not take the place of mpi4py's and our modules before the script starts.
    """
    return ["-P", "-m", "mpi4py"] if version >= (3, 11) else ["-c", _WITHOUT_FOLDER]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", type=int, help="Number of ranks; by default the tasks of the SLURM job, else 1.")
@click.option(
    "--mpi", type=click.Choice(["auto", "site"]), default="auto", show_default=True,
    help="auto: an mpirun beside Python, else the one on PATH; site: only PATH.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the command and start nothing.")
@click.option("--debug", is_flag=True, help="Set MPISPEED_DEBUG=1: errors of mpispeed come with a traceback.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    ranks: int | None,
    mpi: str,
    dry_run: bool,
    debug: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start SCRIPT on N ranks; everything after SCRIPT goes to the script.

    The exit code is that of the job. Inside a SLURM allocation srun starts the ranks, elsewhere mpirun does.
    """
    from mpispeed.launch import plan_launch, run_launch  # not needed for --help

    if not module and not Path(script).is_file():
        msg = f"there is no script {script} (looked from {Path.cwd()}); give its path, or -m for a module"
        raise UsageError(msg)
    words = [*(["-m"] if module else []), script, *arguments]
    program = [sys.executable, *runner(), "-m", "mpispeed.launch.rank", *words]
    launch = plan_launch(program, ranks, mpi=mpi, is_debug=debug)
    if dry_run:
        click.echo(launch.describe())
        return
    ctx.exit(run_launch(launch))
