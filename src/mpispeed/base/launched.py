"""This process's place by the environment variables of its launcher: read without MPI, and before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SIZES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "PMI_SIZE": "mpirun of MPICH or Intel MPI, or srun --mpi=pmi2",
    "SLURM_STEP_NUM_TASKS": "srun",
    "WORLD_SIZE": "a launcher of torch.distributed (torchrun, accelerate, deepspeed)",
}
"""Variable with the number of ranks, by launcher; the first that is set counts.

SLURM's stands behind those of MPI: under an mpirun inside a SLURM job it counts the helpers of that mpirun.
"""

RANKS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "WORLD_SIZE": "RANK",
}

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Only workers of torchrun, or of what starts them as torchrun does, have it."""

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What processes of torch.distributed need to find each other; one or two of them alone are left-overs."""

RANK_PID = "MPISPEED_RANK_PID"
"""Set by a rank of MPI to its own process id; what it starts inherits it, together with the launcher's variables."""

LAUNCHERS = ("mpirun", "mpiexec", "hydra_", "prte", "orte", "srun", "slurmstepd")
"""How the names of processes begin that start ranks."""

_OTHER_LAUNCHERS = ("HYDI_CONTROL_FD", "PMI_FD", "PMIX_RANK", "OMPI_MCA_ess_base_jobid", "PRTE_LAUNCHED")


def launched_size(env: Mapping[str, str]) -> tuple[str, int]:
    """The variable with the number of ranks and its value; ("", 1) without a launcher."""
    for name in ["WORLD_SIZE"] * (TORCHRUN in env) + list(SIZES):
        text = env.get(name, "")
        if not text.isdigit():
            continue
        if name == "SLURM_STEP_NUM_TASKS" and _is_inside_mpirun(env):
            continue
        if name == "WORLD_SIZE" and TORCHRUN not in env and not all(env.get(each) for each in RENDEZVOUS):
            continue
        return name, int(text)
    return "", 1


def _is_inside_mpirun(env: Mapping[str, str]) -> bool:
    """True if SLURM's variables are those of the helpers of an mpirun."""
    is_of_srun = env.get("PMIX_NAMESPACE", "").startswith("slurm.")
    return any(name in env for name in _OTHER_LAUNCHERS if name != "PMIX_RANK" or not is_of_srun)


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """This process's number by the launcher; 0 without one. Never a rank to compute with."""
    name, _ = launched_size(env)
    text = env.get(RANKS.get(name, ""), "")
    return int(text) if text.isdigit() else 0


def is_child_of_rank(env: Mapping[str, str] = os.environ) -> bool:
    """True if a rank of MPI started this process, or a parent of it, and no launcher stands between them.

    A job that a rank starts inherits the variable too; its launcher shows that its processes are ranks themselves.
    """
    text = env.get(RANK_PID, "")
    if not text.isdigit() or int(text) == os.getpid():
        return False
    pid = os.getppid()
    while pid > 0:
        name, parent = _name_and_parent(pid)
        if name.startswith(LAUNCHERS):  # before the number is compared: it may come from another machine
            return False
        if pid == int(text):
            return True
        pid = parent
    return False


def _name_and_parent(pid: int) -> tuple[str, int]:
    """Name of a process and the id of its parent; ("", 0) where the system does not tell."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        return before.partition("(")[2], int(after.split()[1])
    except (OSError, ValueError, IndexError):
        return "", 0
