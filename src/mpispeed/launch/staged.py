"""Stages the environment for a job: the way to its nodes, as its launcher goes it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from mpispeed.launch import srun
from mpispeed.launch.command import plan_launch, takes_srun
from mpispeed.launch.hosts import is_here
from mpispeed.launch.options import Binding, Wishes
from mpispeed.staging.spread import Here, MpiJob, Reach, SlurmSteps

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def reach_of(wishes: Wishes, ranks: int | None, mpi: str, environ: Mapping[str, str]) -> Reach:
    """The way to the nodes of a start.

    Raises:
        ConfigError: the launcher is none of those that can be chosen.
        UsageError: it is not there.
    """
    if takes_srun(wishes.launcher, environ):
        nodes = len(wishes.hosts) or srun.allocation_size(environ)[1]
        if nodes == 1 and "SLURMD_NODENAME" in environ and not wishes.hosts:
            return Here()
        flags = [f"--nodelist={','.join(host.name for host in wishes.hosts)}"] if wishes.hosts else []
        return SlurmSteps(nodes, flags, has_all=nodes == srun.allocation_size(environ)[1])
    if not wishes.extra and (not wishes.hosts or (len(wishes.hosts) == 1 and is_here(wishes.hosts[0].name))):
        return Here()

    def start(program: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        # Whoever gives flags of his own may have named hosts there, and then nobody else knows how many.
        hosts = tuple(replace(host, slots=host.slots[:1]) for host in wishes.hosts)
        placed = replace(wishes, hosts=hosts, binding=Binding(), has_runner=False, has_torch_env=False)
        launch = plan_launch(program, None if hosts else ranks, mpi=mpi, environ=environ, wishes=placed)
        return launch.argv, launch.added

    return MpiJob(start)


def job_number(environ: Mapping[str, str]) -> str:
    """The job that a folder belongs to: its number in SLURM, else this process."""
    return environ.get("SLURM_JOB_ID") or f"p{os.getpid()}"


def lease_of(environ: Mapping[str, str], *, is_held: bool) -> str:
    """The lease of a folder: see `staging.folders.make_folder`.

    Args:
        environ: of the job.
        is_held: this process holds the lock as long as the folder is in use.
    """
    restarts = environ.get("SLURM_RESTART_COUNT") or "0"
    return f"{restarts} {socket.gethostname()}" if is_held else restarts


@contextmanager
def ended_by_exit() -> Iterator[None]:
    """Within it a signal that ends this process does so by `SystemExit`, so that what was staged is removed."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDINGS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
