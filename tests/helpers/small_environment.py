"""A virtual environment of its own, as small as one can be whose ranks join MPI: for tests that pack it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.system import ROOT

PACKAGES = ("mpi4py", "click")
OF_RUN = (*PACKAGES, "numpy", "numpy.libs")
"""For `mpispeed run`, which reads reports of ranks with numpy."""


def small_environment(folder: Path, packages: Sequence[str] = PACKAGES) -> Path:
    """Make it in `folder`; return its Python. mpispeed is an editable install there, as in a checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = Path(sysconfig.get_path("purelib"))
    sites = folder / own.relative_to(sys.prefix)
    # mpi4py looks for the MPI of a wheel by its list of files.
    for name in (*packages, *(path.name for path in own.glob("mpich*.dist-info"))):
        shutil.copytree(own / name, sites / name)
    (sites / "__editable__.mpispeed.pth").write_text(f"{ROOT}/src\n")
    for program in (*Path(sys.prefix, "bin").glob("hydra_*"), *Path(sys.prefix, "bin").glob("mpi*")):
        if program.name != "mpispeed":
            os.link(program.resolve(), folder / "bin" / program.name)
    for library in Path(sys.prefix, "lib").glob("libmpi*"):
        shutil.copy(library, folder / "lib" / library.name)
    shutil.copytree(Path(sys.prefix, "lib", "mpich"), folder / "lib" / "mpich")
    return folder / "bin" / "python"
