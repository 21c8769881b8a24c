"""What launchers say in environment variables, compared with what the MPI library sees."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mpispeed.base.errors import ConfigError

log = logging.getLogger(__name__)

_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "PMI_SIZE": "mpirun of MPICH or Intel MPI, or srun --mpi=pmi2",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""Variable with the number of ranks, by launcher; the first that is set counts.

SLURM's stands last: under an mpirun inside a SLURM job it counts the helpers of that mpirun.
"""

_RANKS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}

_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")

_OTHER_LAUNCHERS = ("HYDI_CONTROL_FD", "PMI_FD", "PMIX_RANK", "OMPI_MCA_ess_base_jobid", "PRTE_LAUNCHED")


def cores() -> frozenset[int]:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def launched_size(env: Mapping[str, str]) -> tuple[str, int]:
    """The variable that tells the number of ranks and its value; ("", 1) without a launcher."""
    for name in _SIZES:
        text = env.get(name, "")
        if not text.isdigit():
            continue
        if name == "SLURM_STEP_NUM_TASKS" and any(other in env for other in _OTHER_LAUNCHERS):
            continue
        return name, int(text)
    return "", 1


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """This process's number by the launcher; 0 without one. Never a rank to compute with."""
    name, _ = launched_size(env)
    text = env.get(_RANKS.get(name, ""), "")
    return int(text) if text.isdigit() else 0


def prepare(env: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Make MPICH yield the core when ranks outnumber cores; it reads the setting when MPI is joined."""
    local = next((int(env[name]) for name in _LOCAL_SIZES if env.get(name, "").isdigit()), 1)
    if local > len(cores()):
        env.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")


def warn_early(env: Mapping[str, str] = os.environ) -> None:
    """Say what to do before MPI is joined, where joining ends the process: the wheel of MPICH speaks no PMIx."""
    speaks_pmix = "PMIX_RANK" in env and "PMI_SIZE" not in env
    if not speaks_pmix or env.get("MPI4PY_LIBMPI") or env.get("MPI4PY_MPIABI", "mpich") != "mpich":
        return
    try:
        version = importlib.metadata.version("mpich")
    except importlib.metadata.PackageNotFoundError:
        return
    if env["PMIX_RANK"] == "0":
        is_mpirun = any(name in env for name in ("OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED"))
        name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_ID" in env and not is_mpirun else "OMPI_COMM_WORLD_SIZE"
        log.warning(
            "this Python has MPICH %s from a wheel, and the launcher speaks PMIx, which that MPICH may not; if it "
            'aborts now with "unsupported PMI version": %s', version, _cure(name, "MPICH"),
        )  # fmt: skip


def check(world_size: int, library: str, env: Mapping[str, str] = os.environ) -> None:
    """Refuse to run as many worlds of one where the launcher started one world.

    Raises:
        ConfigError: with the cure.
    """
    name, wanted = launched_size(env)
    if wanted > 1 and world_size == 1:
        short = library.split("\n")[0].strip("\0 ")
        msg = (
            f"the launcher started {wanted} processes ({name}={wanted}, set by {_SIZES[name]}), but the MPI library "
            f"({short}) sees only one: launcher and library belong to different MPIs. {_cure(name, library)}"
        )
        raise ConfigError(msg)


def check_alone(reason: BaseException, env: Mapping[str, str] = os.environ) -> None:
    """Refuse to run without MPI where a launcher started several processes.

    Raises:
        ConfigError: naming why MPI could not be loaded.
    """
    name, wanted = launched_size(env)
    if wanted > 1:
        msg = (
            f"the launcher started {wanted} processes ({name}={wanted}), but MPI cannot be loaded: {reason}. Install "
            "it with pip install 'mpispeed[mpich]', or load the site's MPI module before starting"
        )
        raise ConfigError(msg)


def _cure(name: str, library: str) -> str:
    is_open = "Open MPI" in library
    if name == "SLURM_STEP_NUM_TASKS":
        return f"Start with srun --mpi={'pmix' if is_open else 'pmi2'}."
    own = Path(sys.executable).parent / "mpirun"
    if own.exists():
        return f"Start with {own}, which belongs to this Python's MPI."
    abi = "mpich" if is_open else "openmpi"
    return (
        f"Start with the mpirun of {'Open MPI' if is_open else 'MPICH'}, or set MPI4PY_MPIABI={abi} to load the "
        "library that belongs to this launcher."
    )
