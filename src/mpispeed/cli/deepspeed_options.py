"""Options of DeepSpeed's launcher that `mpispeed run` takes too: their effect here, or why they need none."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch.hosts import Host, is_here
from mpispeed.launch.srun import is_inside_allocation

_NOT_NEEDED = {
    "force_multi": "--force_multi is not needed: one host and several are started in the same way",
    "no_local_rank": "--no_local_rank is not needed: no --local_rank is added to the words of the script",
    "deepspeed": "--deepspeed before the script is not needed; behind it, it is the script's",
}
_NODE_RANK = "--node_rank is not needed: the launcher numbers the hosts in the order of the host file"

OPTIONS = (
    click.option("--ssh-port", "--ssh_port", type=click.IntRange(1, 65535), help="Port of ssh on the other hosts."),
    click.option("--no-ssh", "--no_ssh", is_flag=True,
                 help="Refuse to reach other hosts by ssh; there is no start of each host by itself, as one launcher "
                 "starts all ranks."),
    click.option("--node-rank", "--node_rank", type=click.IntRange(min=0),
                 help="Accepted; the launcher numbers the hosts."),
    click.option("--save-pid", "--save_pid", is_flag=True,
                 help="Keep the number of this process in PID.deepspeed, in /tmp or TMPDIR, during the job."),
    click.option("--force-multi", "--force_multi", is_flag=True,
                 help="Accepted; one host and several are started in the same way."),
    click.option("--no-local-rank", "--no_local_rank", is_flag=True,
                 help="Accepted; the script gets no --local_rank anyway."),
    click.option("--deepspeed", is_flag=True, hidden=True),
    click.option("--autotuning", type=click.Choice(["tune", "run"]), default=None,
                 help="Search for fast settings first, as `mpispeed tune`; run: then train with the best ones."),
)  # fmt: skip


def notice(text: str) -> None:
    """Say something about the options on stderr."""
    click.echo(f"mpispeed: notice: {text}", err=True)


def check(chosen: Mapping[str, Any], environ: Mapping[str, str], hosts: Sequence[Host]) -> None:
    """Say which options are not needed, and refuse what cannot be done over MPI.

    Raises:
        ConfigError: ranks on other hosts without ssh.
    """
    for name, sentence in _NOT_NEEDED.items():
        if chosen[name]:
            notice(sentence)
    elsewhere = [host.name for host in hosts if not is_here(host.name)]
    is_slurm = chosen["launcher"] == "srun" or (chosen["launcher"] == "auto" and is_inside_allocation(environ))
    if chosen["no_ssh"] and elsewhere and not chosen["ssh"] and not is_slurm:
        msg = (
            f"--no_ssh: one launcher starts the ranks of all hosts and has to reach {', '.join(elsewhere[:3])}; start "
            "inside a SLURM job (--launcher srun), or name a program in place of ssh with --ssh"
        )
        raise ConfigError(msg)
    if chosen["node_rank"] is not None:
        notice(_NODE_RANK)


def agent_of(chosen: Mapping[str, Any], words: Sequence[str]) -> tuple[str, ...]:
    """The words of the program that reaches other hosts, with the port of `--ssh_port`."""
    if chosen["ssh_port"] is None:
        return tuple(words)
    return (*(words or ["ssh"]), "-p", str(chosen["ssh_port"]))


def existing(hostfile: Path | None) -> Path | None:
    """The host file; None, with a notice, if there is none: as in DeepSpeed the run is local then."""
    if hostfile is not None and not hostfile.exists():
        notice(f"there is no host file {hostfile} (looked from {Path.cwd()}); the run uses this machine only")
        return None
    return hostfile


@contextlib.contextmanager
def saved_pid(is_wanted: bool) -> Iterator[None]:
    """Context of a job during which a file has the number of this process, as with DeepSpeed's `--save_pid`.

    Raises:
        UsageError: the file is there already or cannot be written.
    """
    if not is_wanted:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    try:
        with path.open("x") as file:  # never through a link that someone else has put there
            file.write(str(os.getpid()))
    except OSError as error:
        msg = f"--save_pid: {path} cannot be written: {error.strerror}; remove it, or leave --save_pid out"
        raise UsageError(msg) from error
    notice(f"launcher pid: {os.getpid()}, in {path}")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
