"""Finds the mpirun to use and writes its command line: MPICH and its relatives, Intel MPI, Open MPI."""

from __future__ import annotations

import enum
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpispeed.base.errors import ConfigError, UsageError


class Family(enum.Enum):
    """Kinds of MPI that want different flags."""

    MPICH = "MPICH"
    INTEL = "Intel MPI"
    OPEN_MPI = "Open MPI"
    OTHER = "unknown MPI"


# Words in the answer to `mpirun --version`, the most specific first.
_WORDS = (
    ("open mpi", Family.OPEN_MPI),
    ("open-mpi", Family.OPEN_MPI),
    ("openrte", Family.OPEN_MPI),
    ("prrte", Family.OPEN_MPI),
    ("intel", Family.INTEL),
    ("hydra", Family.MPICH),
    ("mpich", Family.MPICH),
    ("mvapich", Family.MPICH),
)


@dataclass(frozen=True, slots=True)
class Mpirun:
    """A launcher that was found."""

    path: Path
    family: Family


@functools.lru_cache(maxsize=8)
def identify(path: Path) -> Family:
    """Ask the launcher at `path` which MPI it belongs to."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Family.OTHER
    answer = (done.stdout + done.stderr).lower()
    return next((family for word, family in _WORDS if word in answer), Family.OTHER)


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
            return Mpirun(Path(found), identify(Path(found)))
    msg = (
        f"no mpirun was found beside {python} or on PATH; load your site's MPI module, "
        'or install one: pip install "mpispeed[mpich]"'
    )
    if mpi == "site":
        msg = f"no mpirun of the site is on PATH ({beside} is not searched); load your site's MPI module"
    raise UsageError(msg)


def mpirun_argv(mpirun: Mpirun, ranks: int, program: Sequence[str], *, cores: int, is_root: bool) -> list[str]:
    """The command line that starts `program` on `ranks` ranks of this node."""
    flags: list[str] = []
    if mpirun.family is Family.OPEN_MPI:
        if is_root:
            flags.append("--allow-run-as-root")
        if ranks > cores:
            # Its default binds one rank to a core and refuses the first rank too many.
            flags += ["--oversubscribe", "--bind-to", "none"]
    return [str(mpirun.path), *flags, "-n", str(ranks), *program]


def mpi_choice(mpirun: Mpirun, *, python: str = sys.executable) -> dict[str, str]:
    """Variables that make mpi4py load the library of this launcher when a wheel of another MPI lies beside it."""
    if mpirun.path.parent.resolve() == Path(python).parent.resolve():
        return {}
    by_family = {Family.OPEN_MPI: "openmpi", Family.MPICH: "mpich", Family.INTEL: "mpich"}
    wheel = Path(python).parent / "mpirun"
    if mpirun.family not in by_family or not wheel.exists():
        return {}
    return {"MPI4PY_MPIABI": by_family[mpirun.family]}
