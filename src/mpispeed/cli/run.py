"""`mpispeed run`: start a training script on N ranks with the available MPI or SLURM."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.units import format_bytes
from mpispeed.cli.deepspeed_options import saved_pid
from mpispeed.cli.run_options import program_of, wishes_of, with_options
from mpispeed.cli.run_staged import maybe_staged
from mpispeed.launch.options import Wishes

__all__ = ["run"]

MERGE_BYTES = 256 << 20
"""Size of all logs above which they are merged on request only, because the end of the command waits for it."""

WATCHER_SECONDS = 5.0
"""Time that the end of a failed job waits for the watchers, which take one or two seconds."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@with_options
@click.option("--dry-run", is_flag=True, help="Show the command and start nothing.")
@click.option("--debug", is_flag=True, help="Set MPISPEED_DEBUG=1: errors of mpispeed come with a traceback.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.option("--no-python", "--no_python", is_flag=True, help="SCRIPT is a program to start without Python.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, script: str, arguments: tuple[str, ...], **chosen: Any) -> None:
    """Start SCRIPT on N ranks; everything after SCRIPT goes to the script.

    The exit code is that of the job. Inside a SLURM allocation srun starts the ranks, elsewhere mpirun does.
    """
    arguments = _tuned(chosen, script, arguments)
    chosen["torch_env"] = chosen["torch_env"] or chosen["as_deepspeed"]
    program: Sequence[str] = program_of(chosen, script, arguments)
    wishes = wishes_of(chosen, os.environ)
    with maybe_staged(chosen, program, wishes) as (program, wishes):
        code = _start(chosen, program, wishes, arguments)
    ctx.exit(code)


def _start(chosen: dict[str, Any], program: Sequence[str], wishes: Wishes, arguments: tuple[str, ...]) -> int:
    """Start the job, wait for its end, and explain it; return its exit code."""
    from mpispeed.launch import plan_launch, run_launch
    from mpispeed.watchdog.report import INTERRUPTED, WATCHING, wait_for_watchers  # not needed for --help

    ranks = None if wishes.hosts else chosen["ranks"]
    if chosen["elastic"]:
        from mpispeed.cli.run_elastic import supervisor_of

        supervisor = supervisor_of(chosen, wishes, program, arguments)
        launch = supervisor.plan(supervisor.choose(supervisor.hosts), 0)
    else:
        launch = plan_launch(program, ranks, mpi=chosen["mpi"], is_debug=chosen["debug"], wishes=wishes)
    if chosen["dry_run"]:
        click.echo(launch.describe())
        return 0
    if "MPISPEED_RUN_DIR" in wishes.variables:
        _make_folder(Path(wishes.variables["MPISPEED_RUN_DIR"]))
    with saved_pid(chosen["save_pid"]), tempfile.TemporaryDirectory(prefix="mpispeed-run-") as folder:
        said = Path(folder) / "said"  # made by a watcher that has explained the end of the job
        (Path(folder) / WATCHING).touch()
        os.environ["MPISPEED_SAID"] = str(said)
        signals: list[int] = []

        def note(number: int) -> None:
            signals.append(number)
            if number == signal.SIGINT:
                said.with_name(INTERRUPTED).touch()

        code = supervisor.run() if chosen["elastic"] else run_launch(launch, on_signal=note)
        if launch.is_hydra:
            code = _with_signals(code, signals)
        if code:
            wait_for_watchers(Path(folder), WATCHER_SECONDS)
        if not said.exists():
            _explain(code, is_hydra=launch.is_hydra)
    _merge_logs(wishes.variables.get("MPISPEED_RUN_DIR") or os.environ.get("MPISPEED_RUN_DIR", ""))
    return code


def _tuned(chosen: dict[str, Any], script: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The words of the script, with --autotuning run those for the best settings; --autotuning tune ends here."""
    if not chosen["autotuning"]:
        return arguments
    from mpispeed.cli.tune import autotuned  # not needed by other runs

    words = autotuned(chosen, script, arguments)
    if chosen["autotuning"] == "tune" or words is None:
        sys.exit(0)
    return tuple(words)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"the folder of the run cannot be made: {error}; give another one with --run-dir"
        raise UsageError(msg) from error


def _merge_logs(folder: str) -> None:
    """Merge the logs of the ranks, if they are kept; a job's exit code does not depend on that."""
    if not folder:
        return
    from mpispeed.logs.merge import find_logs, merge_logs  # not needed without a folder

    later = f"merge them with `mpispeed logs merge {shlex.quote(folder)}`"
    try:
        size_bytes = sum(path.stat().st_size for path in find_logs(Path(folder)).values())
        if size_bytes > MERGE_BYTES:
            click.echo(f"mpispeed: the logs of the ranks have {format_bytes(size_bytes)}; {later}", err=True)
        else:
            merge_logs(Path(folder))
    except OSError as error:
        click.echo(f"mpispeed: notice: the logs in {folder} are not merged: {error}", err=True)
    except KeyboardInterrupt:
        click.echo(f"mpispeed: the logs in {folder} are not merged; {later}", err=True)


def _with_signals(code: int, signals: Sequence[int]) -> int:
    """Correct the exit code of hydra, which reports a signal by its bare number, after we have forwarded `signals`.

    Python that is interrupted while it loads libraries may also die in one of them; and hydra, whose proxies get
    Ctrl-C from the terminal too, may stumble over its own end of the job.
    """
    if code in signals:  # 2 would be a refusal of settings
        return 128 + code
    is_interrupted = signal.SIGINT in signals and code in (*_FATAL, _HYDRA_FAILED)
    return 128 + signal.SIGINT if is_interrupted else code


def _explain(code: int, *, is_hydra: bool) -> None:
    """Explain the exit code of a job that a signal has ended."""
    if code > 128 or (is_hydra and code in _FATAL):
        from mpispeed.watchdog.exits import describe_exit_code  # not needed by jobs that end well

        click.echo(f"mpispeed: {describe_exit_code(code, is_hydra=is_hydra)}", err=True)


_FATAL = (4, 6, 7, 8, 9, 11)
"""Signals that hydra reports by their bare number and that no program uses as exit code: they kill it in mid-work."""

_HYDRA_FAILED = 255
"""Exit code of hydra when one of its own processes ended by a failed check."""
