"""`mpispeed env`: RANK, WORLD_SIZE, MASTER_ADDR and the like for programs that insist on them, from the launcher."""

from __future__ import annotations

import os
import shlex
import sys

import click

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.launched import launched_rank
from mpispeed.base.site_file import current


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def env(program: tuple[str, ...]) -> None:
    """Start PROGRAM with the variables of torch.distributed, or print them for a shell.

    To be called by each rank: srun mpispeed env -- python train.py, or mpirun -n 4 mpispeed env -- python train.py.
    Rank, number of ranks and place on the node are those of the launcher. MPI is not joined. Variables of the site
    file that are not set come with them.
    """
    from mpispeed.launch.torch_env import advice, torch_variables

    try:
        found = torch_variables()
        site = current().missing_from(os.environ)
    except (ConfigError, UsageError):
        if launched_rank() == 0:  # all ranks find the same
            raise
        sys.exit(2)
    found = {**site, **found}
    if warning := advice(os.environ, found):
        click.echo(f"mpispeed: warning: {warning}", err=True)
    if not program:
        for name, value in found.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        return
    sys.stdout.flush()
    try:
        os.execvpe(program[0], program, {**os.environ, **found})
    except OSError as error:
        is_script = program[0].endswith(".py")
        cure = f"python {program[0]}" if is_script else "its path, or the name of a program on PATH"
        msg = f"{program[0]} cannot be started: {error.strerror}; give {cure}"
        raise UsageError(msg) from error
