"""Environment variables of launchers, compared with the world that the MPI library sees."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from mpispeed.base.errors import ConfigError
from mpispeed.base.launched import RENDEZVOUS, SIZES, TORCHRUN, launched_rank, launched_size

log = logging.getLogger(__name__)

_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")


def cores() -> frozenset[int]:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def prepare(env: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Make MPICH yield the core when ranks outnumber cores; it reads the setting when MPI is joined."""
    local = next((int(env[name]) for name in _LOCAL_SIZES if env.get(name, "").isdigit()), 1)
    if local > len(cores()):
        env.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")


def warn_early(env: Mapping[str, str] = os.environ) -> None:
    """Advise before MPI is joined, where joining ends the process: the wheel of MPICH speaks no PMIx."""
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


def check_torchrun(env: Mapping[str, str] = os.environ) -> None:
    """Refuse workers of torchrun before MPI is joined, which may end them silently: they are no ranks of MPI.

    Under srun they inherit its variables, and with them the place of another process.

    Raises:
        ConfigError: with the command that starts the same ranks.
    """
    if TORCHRUN not in env:
        return
    name, wanted = launched_size(env)
    outer = {key: value for key, value in env.items() if key not in (TORCHRUN, "WORLD_SIZE")}
    by_mpi = launched_size(outer)[1], launched_rank(outer)
    if wanted > 1 and by_mpi != (wanted, launched_rank(env)):
        raise ConfigError(_as_torch(name, wanted, env))


def check(world_size: int, library: str, env: Mapping[str, str] = os.environ) -> None:
    """Refuse to run as many worlds of one where the launcher started one world.

    Raises:
        ConfigError: with the cure.
    """
    name, wanted = launched_size(env)
    if wanted > 1 and world_size == 1 and name == "WORLD_SIZE":
        raise ConfigError(_as_torch(name, wanted, env))
    if wanted > 1 and world_size == 1:
        short = " ".join(library.split("\n")[0].strip("\0 ").split())
        msg = (
            f"the launcher started {wanted} processes ({name}={wanted}, set by {SIZES[name]}), but the MPI library "
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


def _as_torch(name: str, wanted: int, env: Mapping[str, str]) -> str:
    """Advice for a process started by torch.distributed's launcher."""
    is_certain = TORCHRUN in env
    who, variables = ("torchrun", [name, TORCHRUN]) if is_certain else (SIZES[name], RENDEZVOUS)
    script = shlex.quote(sys.argv[0]) if sys.argv[0] not in ("", "-c", "-m") else "SCRIPT"
    stale = "if nobody started these processes together" if not is_certain else "if this is not a worker of torchrun"
    return (
        f"{who} started {wanted} processes ({name}={wanted}), but MPI connects mpispeed's ranks, and knows nothing of "
        f"them: each would train alone. Start with: mpispeed run -n {wanted} {script} ARGUMENTS (or mpirun -n {wanted} "
        f"python {script} ARGUMENTS; inside SLURM srun); {stale}, unset {' '.join(variables)}"
    )


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
