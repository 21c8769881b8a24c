"""Finds the mpirun that fits the MPI library; see mpirun_words for its command line."""

from __future__ import annotations

import enum
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpispeed.base.errors import ConfigError, UsageError


class Family(enum.Enum):
    """Kinds of MPI that need different flags."""

    MPICH = "MPICH"
    INTEL = "Intel MPI"
    OPEN_MPI = "Open MPI"
    PALS = "Cray PALS"
    OTHER = "unknown MPI"


# Words in the answer to `mpirun --version`, the most specific first.
_WORDS = (
    ("pals", Family.PALS),
    ("open mpi", Family.OPEN_MPI),
    ("open-mpi", Family.OPEN_MPI),
    ("openrte", Family.OPEN_MPI),
    ("prrte", Family.OPEN_MPI),
    ("intel", Family.INTEL),
    ("hydra", Family.MPICH),
    ("mpich", Family.MPICH),
    ("mvapich", Family.MPICH),
)


_OF_BATCH_SYSTEMS = (
    "PBS_ENVIRONMENT", "PBS_NODEFILE", "LSB_JOBID", "LOADL_HOSTFILE", "PE_HOSTFILE", "QSUB_REQID",
    "NB_PARALLEL_JOB_HOSTS",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mpirun:
    """A launcher that was found; `version` is its major version, 0 if it does not tell."""

    path: Path
    family: Family
    version: int = field(default=0, compare=False)


@functools.lru_cache(maxsize=8)
def identify(path: Path) -> Mpirun:
    """Ask the launcher at `path` which MPI it belongs to."""
    # Intel's is a shell script that looks for its neighbours on PATH.
    beside = {**os.environ, "PATH": f"{path.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False, env=beside)
    except (OSError, subprocess.TimeoutExpired):
        return Mpirun(path, Family.OTHER)
    answer = (done.stdout + done.stderr).lower()
    if "pals" in path.resolve().parts:  # /opt/cray/pals/VERSION/bin/mpiexec
        answer = f"pals {answer}"
    family = next((family for word, family in _WORDS if word in answer), Family.OTHER)
    number = re.search(r"(\d+)\.\d", answer)
    return Mpirun(path, family, int(number[1]) if number else 0)


def find_mpirun(mpi: str = "auto", *, environ: Mapping[str, str] | None = None, python: str = sys.executable) -> Mpirun:
    """The launcher that fits the MPI library which `python` will load.

    With "auto" an mpirun beside the interpreter wins: it comes from an MPI wheel of the same environment, and
    mpi4py takes its library from there too. With "site" only PATH is searched, past such a wheel.

    Raises:
        ConfigError: `mpi` is neither "auto" nor "site".
        UsageError: there is no mpirun.
    """
    if mpi not in ("auto", "site"):
        msg = f'the MPI to use is "auto" or "site", not {mpi!r}'
        raise ConfigError(msg)
    environ = os.environ if environ is None else environ
    beside = Path(python).parent
    folders = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    if mpi == "auto":
        folders.insert(0, str(beside))
    else:
        folders = [folder for folder in folders if Path(folder).resolve() != beside.resolve()]
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=os.pathsep.join(folders))
        if found:
            return _without_script(identify(Path(found)), environ)
    msg = (
        f"no mpirun was found beside {python} or on PATH; load your site's MPI module, "
        'or install one: pip install "mpispeed[mpich]"'
    )
    if mpi == "site":
        msg = f"no mpirun of the site is on PATH ({beside} is not searched); load your site's MPI module"
    raise UsageError(msg)


def _without_script(mpirun: Mpirun, environ: Mapping[str, str]) -> Mpirun:
    """Intel's program behind its mpirun, a shell script that passes no signal on: the job would outlive it.

    The script stays where it does something: it reads settings of an installation, and host files of batch systems.
    """
    program = mpirun.path.with_name("mpiexec.hydra")
    if mpirun.family is not Family.INTEL or not program.exists() or any(name in environ for name in _OF_BATCH_SYSTEMS):
        return mpirun
    folder = mpirun.path.parent
    settings = (folder / "mpivars.sh", folder.parent / "env" / "vars.sh", folder.parent / "setvars.sh")
    if "I_MPI_ROOT" not in environ and any(path.exists() for path in settings):
        return mpirun
    return Mpirun(program, mpirun.family, mpirun.version)


def mpi_choice(mpirun: Mpirun, *, python: str = sys.executable) -> dict[str, str]:
    """Variables that make mpi4py load this launcher's library when a wheel of another MPI lies beside it."""
    if mpirun.path.parent.resolve() == Path(python).parent.resolve():
        return {}
    by_family = {Family.OPEN_MPI: "openmpi", Family.MPICH: "mpich", Family.INTEL: "mpich"}
    wheel = Path(python).parent / "mpirun"
    if mpirun.family not in by_family or not wheel.exists():
        return {}
    return {"MPI4PY_MPIABI": by_family[mpirun.family]}
