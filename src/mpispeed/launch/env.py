"""Environment variables for ranks and for other hosts, and the facts about this node that decide them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from mpispeed.base.errors import ConfigError

_PREFIXES = (
    "MPISPEED_", "MPI4PY_", "PYTHON", "MLFLOW", "WANDB", "HF_", "TORCH", "NCCL", "OMP_", "MKL_", "KMP_", "UCX_", "FI_",
    "MPICH_", "MPIR_", "MV2_", "I_MPI_", "ACCELERATE_",
)  # fmt: skip
_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_HOME", "MASTER_ADDR", "MASTER_PORT")
_FILES = (".deepspeed_env", ".mpispeed_env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CPU = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Number of cores this process may run on: an affinity mask or a cgroup can leave fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_cores(folder: Path = _CPU) -> int:
    """Number of usable cores without hardware threads, which is how MPIs count when they bind."""
    if not hasattr(os, "sched_getaffinity"):
        return usable_cores()
    cores = set()
    for number in os.sched_getaffinity(0):
        try:
            cores.add((folder / f"cpu{number}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            return usable_cores()
    return len(cores)


def rank_environment(
    environ: Mapping[str, str], *, ranks_per_node: int, cores: int, is_debug: bool = False
) -> dict[str, str]:
    """Return variables to add to `environ` for the ranks; those that the user has set are left alone.

    Units: `ranks_per_node` ranks share `cores` cores of one node; 0 cores if the number is unknown, and
    then the ranks find out.
    """
    wanted = {"PYTHONUNBUFFERED": "1"}
    if cores:
        wanted["OMP_NUM_THREADS"] = str(max(1, cores // ranks_per_node))
    if cores and ranks_per_node > cores:
        # A rank that waits would spin through its time slice while the rank it waits for has no core:
        # milliseconds for each small collective, instead of microseconds.
        wanted["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
        wanted["I_MPI_THREAD_YIELD"] = "3"
    added = {name: value for name, value in wanted.items() if name not in environ}
    if is_debug:
        added["MPISPEED_DEBUG"] = "1"
    return added


def exported_names(environ: Mapping[str, str], added: Mapping[str, str]) -> tuple[str, ...]:
    """Names of variables for launchers that pass nothing on to other hosts by themselves."""
    known = {name for name in environ if name.startswith(_PREFIXES) or name in _NAMES}
    return tuple(sorted({*known, *added}))


def file_variables(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables for all ranks from the files .deepspeed_env and .mpispeed_env, in the home folder and in `folder`.

    The later file wins. DS_ENV_FILE is another name, or a path, for the first of the two.

    Raises:
        ConfigError: a line is not KEY=VALUE.
    """
    names = (environ.get("DS_ENV_FILE") or _FILES[0], _FILES[1])
    homes = [Path(environ["HOME"])] if environ.get("HOME") else []
    found: dict[str, str] = {}
    for name in names:
        for path in dict.fromkeys((place / name).absolute() for place in (*homes, folder)):
            if path.is_file():
                found |= parse_variables(path.read_text(), str(path))
    return found


def parse_variables(text: str, where: str) -> dict[str, str]:
    """Parse lines KEY=VALUE; blank lines and those that begin with # are skipped.

    A value keeps its spaces and any further =; quotes around all of it are removed, nothing is expanded.

    Raises:
        ConfigError: naming `where` and the line.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        name, equals, value = words.partition("=")
        if not equals or not _NAME.fullmatch(name):
            msg = f"{where}, line {number}: {words!r} is not a variable; write KEY=VALUE"
            raise ConfigError(msg)
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found
