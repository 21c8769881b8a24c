"""Plans the start of a job and runs it: which launcher, which flags, which variables, and what becomes of signals."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch import env, srun
from mpispeed.launch.mpirun import Family, find_mpirun, mpi_choice, mpirun_argv

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A job that can be started: its command line and the variables added to the environment."""

    argv: tuple[str, ...]
    added: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """The same as a line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.added.items())]
        return " ".join([*settings, shlex.join(self.argv)])


def _slurm_family(mpi: str, environ: Mapping[str, str]) -> Family | None:
    """The MPI that ranks of a SLURM step load; None where the site has no mpirun to ask, as on Cray systems."""
    try:
        return find_mpirun(mpi, environ=environ).family
    except UsageError:
        return None


def plan_launch(
    program: Sequence[str],
    ranks: int | None = None,
    *,
    mpi: str = "auto",
    is_debug: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Launch:
    """Decide how to start `program` on `ranks` ranks; None takes the tasks of a SLURM allocation, else one rank.

    Raises:
        ConfigError: the number of ranks is not positive.
        UsageError: there is no launcher, or a variable of SLURM is not a number.
    """
    environ = os.environ if environ is None else environ
    if ranks is not None and ranks < 1:
        msg = f"the number of ranks is {ranks}; ask for at least 1 (-n)"
        raise ConfigError(msg)
    cores = env.usable_cores()
    if srun.is_inside_allocation(environ):
        tasks, nodes = srun.allocation_size(environ)
        ranks = tasks if ranks is None else ranks
        per_node = -(-ranks // nodes)
        argv = srun.srun_argv(ranks, program, _slurm_family(mpi, environ), environ)
        share = srun.cores_per_rank(per_node, environ)
        cores = cores if share is None else share * per_node
        return Launch(
            tuple(argv), env.rank_environment(environ, ranks_per_node=per_node, cores=cores, is_debug=is_debug)
        )
    ranks = 1 if ranks is None else ranks
    mpirun = find_mpirun(mpi, environ=environ)
    argv = mpirun_argv(mpirun, ranks, program, cores=cores, is_root=hasattr(os, "geteuid") and os.geteuid() == 0)
    added = env.rank_environment(environ, ranks_per_node=ranks, cores=cores, is_debug=is_debug)
    return Launch(tuple(argv), {**mpi_choice(mpirun), **added})


def _terminal_sends_interrupts() -> bool:
    """True if Ctrl-C reaches the launcher without us, because both are the terminal's foreground job."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def _tie_to_parent() -> Callable[[], None] | None:
    """What a child calls before it starts the job, to be ended should we be killed; None where that cannot be had."""
    if sys.platform != "linux":
        return None
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)  # we were killed before the call

    return tie


def run_launch(launch: Launch) -> int:
    """Start the job, pass signals on, wait, and return its exit code (128 + the number of a fatal signal)."""
    process = subprocess.Popen(launch.argv, env={**os.environ, **launch.added}, preexec_fn=_tie_to_parent())

    def forward(number: int, _frame: FrameType | None) -> None:
        if number not in _OF_TERMINAL or not _terminal_sends_interrupts():
            process.send_signal(number)

    # An ignored signal stays ignored: that is what nohup, and a shell in the background, ask for.
    before = {
        number: signal.signal(number, forward) for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
