"""`mpispeed kernels`: list the CUDA kernels, compile them ahead of time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import UsageError
from mpispeed.cli.lazy import LazyGroup

COMMANDS = {
    "build": ("mpispeed.cli.kernels", "build", "Compile all kernels for named architectures."),
    "ls": ("mpispeed.cli.kernels", "ls", "List the kernels and their sources."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def kernels() -> None:
    """CUDA kernels: list them, compile them ahead of time.

    Without `build` they are compiled at first use, once per node, which takes some seconds and needs nvcc there.
    """


@click.command()
@click.option("--arch", "archs", required=True, metavar="ARCH[,ARCH]", help="Such as sm_80,sm_90.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Folder; default: in the package, where it is looked for. Else set MPISPEED_KERNELS.")  # fmt: skip
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Compilers at a time; default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Write what every kernel needs as JSON.")
def build(archs: str, out: Path | None, jobs: int | None, as_json: bool) -> None:
    """Compile all kernels for the architectures ARCH.

    The exit code is 1 when a kernel that is meant to be fast spills registers.
    """
    from mpispeed.native.cuda import build as builder

    names = [name.strip() for name in archs.split(",") if name.strip()]
    folder = (out or builder.default_folder()).absolute()
    spilled: list[str] = []
    rows: list[dict[str, Any]] = []
    try:
        for made in builder.build(names, folder, jobs):
            spilled += [f"{name} ({made.arch})" for name in made.spilled]
            rows += [
                {"source": made.source, "arch": made.arch, "kernel": entry.kernel, "registers": entry.registers,
                 "spilled_bytes": entry.spilled_bytes, "shared_bytes": entry.shared_bytes}
                for entry in made.resources
            ]  # fmt: skip
            if not as_json:
                _show(made)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "kernels": rows, "spilled": spilled}, indent=1))
    else:
        where = "found without a setting" if out is None else f"set MPISPEED_KERNELS={folder} in jobs"
        click.echo(f"{len(rows)} kernels in {folder} ({where})")
    if spilled:
        click.echo(f"mpispeed kernels: registers are spilled by {', '.join(spilled)}", err=True)
        sys.exit(1)


def _show(made: Any) -> None:
    most = max((entry.registers for entry in made.resources), default=0)
    spills = sum(entry.spilled_bytes for entry in made.resources)
    size = made.path.stat().st_size / 1024
    said = f"{len(made.resources):3d} kernels, at most {most} registers, {spills} bytes spilled, {size:.0f} KiB"
    click.echo(f"{made.source:36s} {made.arch:7s} {said}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write the list as JSON.")
def ls(as_json: bool) -> None:
    """List the kernels, their sources below cuda/, and the formats of their arguments."""
    from mpispeed.native.cuda.catalog import KERNELS

    if as_json:
        rows = [{"kernel": k.name, "source": k.source, "arguments": k.arguments, "is_hot": k.is_hot}
                for k in KERNELS.values()]  # fmt: skip
        click.echo(json.dumps(rows, indent=1))
        return
    for kernel in KERNELS.values():
        click.echo(f"{kernel.source:36s} {kernel.name:36s} {kernel.arguments}{'  hot' if kernel.is_hot else ''}")
