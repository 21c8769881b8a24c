"""`mpispeed compat`: what sites need for scripts and libraries that say `import deepspeed`."""

from __future__ import annotations

from pathlib import Path

import click

from mpispeed.base.errors import UsageError


@click.group()
def compat() -> None:
    """Scripts and libraries that say `import deepspeed`."""


@compat.command()
@click.option(
    "--out", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Where it is written."
)
def wheel(folder: Path) -> None:
    """Write a wheel of the name deepspeed whose modules are the names of mpispeed.

    A site installs it beside mpispeed; then every script of the environment finds it, and the command deepspeed starts
    mpispeed.
    """
    from mpispeed.compat.as_deepspeed import write_wheel

    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = write_wheel(folder)
    except OSError as error:
        msg = f"the wheel cannot be written: {error}; give another folder with --out"
        raise UsageError(msg) from error
    click.echo(path)


@compat.command()
def path() -> None:
    """Print the folder that makes `import deepspeed` find mpispeed, for PYTHONPATH.

    For programs that start others, as in PYTHONPATH=$(mpispeed compat path) accelerate launch ...
    """
    from mpispeed.compat.as_deepspeed import FOLDER

    click.echo(FOLDER)


@compat.command()
@click.argument("module", default="")
def names(module: str) -> None:
    """List DeepSpeed's names of MODULE, say runtime.zero: where each is here, or why it is not.

    Without MODULE: all of its modules.
    """
    from mpispeed.compat.modules import missing, paths, rows, served

    path = module.removeprefix("deepspeed.").removeprefix("deepspeed").removeprefix("mpispeed.")
    if not module:
        click.echo("\n".join(sorted(paths())))
        return
    if path and path not in paths():
        msg = f"there is no module {module!r} in the table; `mpispeed compat names` lists them"
        raise UsageError(msg)
    homes = {name: f"{home}.{ours}".rstrip(".") for name, (home, ours) in rows(path).items()}
    for name in sorted({*served(path), *missing(path)}):
        click.echo(f"{name:50s} {homes.get(name) or missing(path).get(name) or 'mpispeed'}".rstrip())
