"""Plans the start of a job and runs it: launcher, flags, variables, and forwarded signals."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO

from mpispeed.base import site_file
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch import env, srun
from mpispeed.launch.bind import CORES, DEVICES
from mpispeed.launch.hosts import count_ranks, in_slurm_order, is_here
from mpispeed.launch.mpirun import Family, find_mpirun, mpi_choice
from mpispeed.launch.mpirun_words import common_devices, device_variables, launcher_variables, mpirun_argv
from mpispeed.launch.options import Wishes
from mpispeed.launch.torch_env import HOST_RANKS, host_variables

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1
#: until the launcher has ended by an interrupt of its own
_REPEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A job that can be started: its command line and the variables it adds to the environment.

    `is_hydra` is True for the mpirun of MPICH and Intel MPI, whose exit code is the bare number of a fatal signal.
    """

    argv: tuple[str, ...]
    added: Mapping[str, str] = field(default_factory=dict)
    is_hydra: bool = False

    def describe(self) -> str:
        """The launch as a line for a shell."""
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
    wishes: Wishes | None = None,
) -> Launch:
    """Decide how to start `program` on `ranks` ranks.

    None takes the slots of the chosen hosts, else the tasks of a SLURM allocation, else one rank.

    Raises:
        ConfigError: the number of ranks is not positive, an option is not possible, or the site file is wrong.
        UsageError: there is no launcher, or a variable of SLURM is not a number.
    """
    environ = os.environ if environ is None else environ
    wishes = wishes or Wishes()
    if ranks is not None and ranks < 1:
        msg = f"the number of ranks is {ranks}; ask for at least 1 (-n)"
        raise ConfigError(msg)
    of_site = site_file.current(environ).missing_from(environ)
    of_files = env.file_variables(environ, Path.cwd())
    variables = {**of_site, **of_files, **wishes.variables, **device_variables(wishes.hosts)}
    variables |= _listed_cores(wishes)
    environ = {**environ, **variables}
    if wishes.hosts:
        ranks = count_ranks(wishes.hosts)
    plan = _plan_srun if takes_srun(wishes.launcher, environ) else _plan_mpirun
    launch = plan(program, ranks, mpi, is_debug, environ, wishes)
    return replace(launch, added={**variables, **launch.added})


def takes_srun(launcher: str, environ: Mapping[str, str]) -> bool:
    """True if srun is to start the ranks.

    Raises:
        ConfigError: the launcher is none of those that can be chosen.
        UsageError: srun was asked for and is not there.
    """
    if launcher not in ("auto", "mpirun", "srun", "pbs"):
        msg = f'the launcher is "auto", "mpirun", "srun" or "pbs", not {launcher!r}'
        raise ConfigError(msg)
    if launcher == "srun" and not srun.is_installed(environ):
        msg = "--launcher srun: there is no srun on PATH; start on a machine of a SLURM cluster, or use mpirun"
        raise UsageError(msg)
    return launcher == "srun" or (launcher == "auto" and srun.is_inside_allocation(environ))


def _listed_cores(wishes: Wishes) -> dict[str, str]:
    """The variable from which the runner of a rank takes its part of the listed cores.

    Raises:
        ConfigError: there is no such runner, or hosts have different numbers of ranks.
    """
    if not wishes.binding.cores:
        return {}
    if not wishes.has_runner:
        msg = "--bind_core_list works for Python scripts only, not with --no_python; bind with --launcher-args"
        raise ConfigError(msg)
    return {CORES: ",".join(map(str, wishes.binding.cores))}


def _listed_devices(wishes: Wishes) -> dict[str, str]:
    """The variable from which the runner of a rank takes the accelerators of its host.

    SLURM sets CUDA_VISIBLE_DEVICES by itself, whatever srun has in its environment, and for all hosts alike.

    Raises:
        ConfigError: there is no such runner.
    """
    common = common_devices(wishes.hosts)
    if common is None:
        return {}
    if not wishes.has_runner:
        msg = "srun can show chosen GPUs to Python scripts only, not with --no_python; start with --launcher mpirun"
        raise ConfigError(msg)
    lists = {host.name: ",".join(map(str, host.slots)) for host in wishes.hosts}
    return {DEVICES: ";".join(f"{name}={devices}" for name, devices in lists.items())}


def _torch_hosts(wishes: Wishes, environ: Mapping[str, str], *, is_srun: bool) -> dict[str, str]:
    """Variables about the hosts that ranks of torch.distributed need; those that are set stay."""
    if not wishes.has_torch_env:
        return {}
    # With equal numbers srun sorts the hosts, and tells the ranks.
    keeps_order = not is_srun or len({len(host.slots) for host in wishes.hosts}) > 1
    found = host_variables(wishes.hosts, keeps_order=keeps_order)
    return {name: value for name, value in found.items() if name == HOST_RANKS or not environ.get(name)}


def _plan_srun(
    program: Sequence[str],
    ranks: int | None,
    mpi: str,
    is_debug: bool,
    environ: Mapping[str, str],
    wishes: Wishes,
) -> Launch:
    tasks, nodes = (ranks or 1, len(wishes.hosts)) if wishes.hosts else srun.allocation_size(environ)
    ranks = tasks if ranks is None else ranks
    per_node = max((len(host.slots) for host in wishes.hosts), default=-(-ranks // nodes))
    argv = srun.srun_argv(ranks, program, _slurm_family(mpi, environ), environ, wishes)
    share = srun.cores_per_rank(per_node, environ)
    cores = env.usable_cores() if share is None else share * per_node
    added = env.rank_environment(environ, ranks_per_node=per_node, cores=cores, is_debug=is_debug)
    return Launch(tuple(argv), {**added, **_listed_devices(wishes), **_torch_hosts(wishes, environ, is_srun=True)})


def _plan_mpirun(
    program: Sequence[str],
    ranks: int | None,
    mpi: str,
    is_debug: bool,
    environ: Mapping[str, str],
    wishes: Wishes,
) -> Launch:
    ranks = 1 if ranks is None else ranks
    mpirun = find_mpirun(mpi, environ=environ)
    if len(wishes.hosts) == 1 and is_here(wishes.hosts[0].name):
        wishes = replace(wishes, hosts=())
    if wishes.hosts and not wishes.agent and srun.is_inside_allocation(environ):
        wishes = replace(wishes, hosts=in_slurm_order(wishes.hosts, environ))
    # How many cores other hosts have is not known here.
    cores = 0 if wishes.hosts else env.usable_cores()
    added = env.rank_environment(environ, ranks_per_node=ranks, cores=cores, is_debug=is_debug)
    added = {**mpi_choice(mpirun), **launcher_variables(mpirun, wishes, environ), **added}
    added |= _torch_hosts(wishes, environ, is_srun=False)
    argv = mpirun_argv(
        mpirun,
        ranks,
        program,
        cores=cores,
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        wishes=wishes,
        exported=env.exported_names(environ, added),
    )
    return Launch(tuple(argv), added, is_hydra=mpirun.family in (Family.MPICH, Family.INTEL))


def _terminal_sends_interrupts() -> bool:
    """True if Ctrl-C reaches the launcher without us, because both are the terminal's foreground job."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def _tie_to_parent() -> Callable[[], None] | None:
    """Function a child calls before it starts the job, to be killed when we are; None if the system lacks the call."""
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


class _Forwarder:
    """Handler that passes signals on to the launcher; those that come before it is there, as soon as it is."""

    def __init__(self, on_signal: Callable[[int], None] | None) -> None:
        self._on_signal = on_signal
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._delayed: list[threading.Timer] = []

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._on_signal is not None:
            self._on_signal(number)
        if self._process is None:
            self._early.append(number)
        else:
            self._pass_on(self._process, number)

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        """From now on there is somebody to pass them on to."""
        self._process = process
        for number in self._early:
            self._pass_on(process, number)

    def end(self) -> None:
        """Drop what was not passed on yet."""
        for timer in self._delayed:
            timer.cancel()

    def _pass_on(self, process: subprocess.Popen[bytes], number: int) -> None:
        if number not in _OF_TERMINAL:
            process.send_signal(number)
        elif not _terminal_sends_interrupts():
            # Whoever sent it may have sent it to the launcher too, which takes a second one for an order to drop all.
            timer = threading.Timer(_REPEAT_SECONDS, process.send_signal, [number])
            self._delayed.append(timer)
            timer.start()


def run_launch(
    launch: Launch,
    *,
    on_start: Callable[[subprocess.Popen[bytes]], None] | None = None,
    on_signal: Callable[[int], None] | None = None,
) -> int:
    """Start the job, pass signals on, wait, and return its exit code (128 + the number of a fatal signal).

    `on_start` is called with the process of the launcher, `on_signal` with the number of each signal that came.
    """
    forward = _Forwarder(on_signal)
    # An ignored signal stays ignored: that is what nohup, and a shell in the background, ask for.
    before = {
        number: signal.signal(number, forward) for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        process = start_launch(launch, list(before))
        if on_start is not None:
            on_start(process)
        forward.begin(process)
        code = process.wait()
    finally:
        forward.end()
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def start_launch(
    launch: Launch, handled: Sequence[int] = (), *, out: IO[bytes] | None = None, err: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start the job, tied to us: it ends when we do.

    Args:
        launch: the job.
        handled: signals that this process has handlers for; one that comes to the job before it runs ends it, as one
            that comes later.
        out: takes its output, and `err` its errors; then it has no input, and a session of its own, so that what the
            terminal sends to us does not come to it.
        err: by default ours, as for `out`.
    """
    tie, is_apart = _tie_to_parent(), out is not None
    as_before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)

    def begin() -> None:
        if tie is not None:
            tie()
        for number in handled:  # our handlers, which a child of a fork has as well, would swallow it
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, as_before)

    try:
        return subprocess.Popen(
            launch.argv, env={**os.environ, **launch.added}, preexec_fn=begin, stdout=out, stderr=err,
            stdin=subprocess.DEVNULL if is_apart else None, start_new_session=is_apart,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, as_before)
