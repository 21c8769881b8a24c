"""A tuner that itself runs in a step of SLURM starts ranks as one in the batch script does: beside its own step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mpispeed.base.errors import UsageError
from mpispeed.launch import srun
from mpispeed.launch.command import Launch

_OF_STEP = ("SLURM_STEP", "PMI", "SLURM_CPU_BIND", "SLURM_MPI")
_NAMES = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_GTIDS", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_DISTRIBUTION",
    "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_UMASK",
)  # fmt: skip
"""What a step has of its own, or in place of the allocation's; a new step would take it for its own wishes."""


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a batch script of the same allocation; `environ` itself outside of a step.

    Raises:
        UsageError: the step has several tasks, which would be as many tuners.
    """
    if not (srun.is_step(environ) and srun.is_installed(environ)):
        return dict(environ)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        msg = (
            f"the tuner was started {tasks} times, by srun; start it once, in the batch script or by srun --ntasks=1 "
            "--overlap: it starts the ranks itself"
        )
        raise UsageError(msg)
    return {name: value for name, value in environ.items() if not _is_of_step(name)}


def leaving(launch: Launch, environ: Mapping[str, str], known: Mapping[str, str]) -> Launch:
    """The launch without the variables of `environ` that are not in `known`."""
    gone = sorted(environ.keys() - known.keys() - launch.added.keys())
    words = [word for name in gone for word in ("-u", name)]
    return replace(launch, argv=("env", *words, *launch.argv)) if gone else launch


def _is_of_step(name: str) -> bool:
    return name.startswith(_OF_STEP) or name in _NAMES
