"""Facts of a run that its record keeps: versions, the environment by a list of what is allowed, the job, the command.

Keys and passwords are in none of them. A variable is recorded only if it is on a list, and not even then if its name
looks like a key's; words of the command whose names say that they are keys are replaced.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.plain import hide_in_words
from mpispeed.base.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES = (
    "torch", "numpy", "mpi4py", "h5py", "transformers", "accelerate", "peft", "trl", "lightning", "datasets",
    "deepspeed", "mpich", "pycuda",
)  # fmt: skip

ALLOWED = frozenset({
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV",
    "CONDA_PREFIX", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "TORCH_HOME", "TORCH_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LANG",
    "LC_ALL", "TZ", "TMPDIR", "SHELL", "LOADEDMODULES", "SINGULARITY_NAME", "APPTAINER_NAME",
})  # fmt: skip
"""Variables that are recorded."""

ALLOWED_PREFIXES = (
    "MPISPEED_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOMP_", "NCCL_", "UCX_", "FI_", "PSM2_", "MPIR_CVAR_", "MPICH_",
    "MV2_", "I_MPI_", "OMPI_MCA_", "PYTORCH_", "TORCHINDUCTOR_",
)  # fmt: skip
"""Variables whose names begin so are recorded too: settings of libraries that a run's speed and numbers depend on."""

FORBIDDEN = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|PWD|CREDENTIAL|AUTH|COOKIE|URI", re.IGNORECASE)
"""Variables with such names are never recorded, with one exception that holds no token."""

EXCEPTION = "TOKENIZERS_PARALLELISM"

SLURM = (
    "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_QOS",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_START_TIME",
    "SLURM_JOB_END_TIME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU",
    "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_MPI_TYPE", "SLURM_STEP_ID", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST",
    "SLURM_JOB_DEPENDENCY",
)  # fmt: skip
"""Variables of a SLURM job that are recorded."""

PBS = ("PBS_JOBID", "PBS_JOBNAME", "PBS_QUEUE", "PBS_ENVIRONMENT", "PBS_NODEFILE", "PBS_O_HOST", "PBS_O_WORKDIR")
"""Variables of a PBS job that are recorded."""

MOST_VALUE = 4096
"""Characters of a value; the rest is cut off."""


def versions(mpi: str = "") -> dict[str, str]:
    """Versions of this library, of Python and of what it uses; `mpi` is the MPI library's own text."""
    found = {"mpispeed": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" in sys.modules:  # which tells its build too, 2.15.0+cu132, where its metadata does not
        found["torch"] = str(sys.modules["torch"].__version__)
    h5py = sys.modules.get("h5py")
    if h5py is not None:
        found["hdf5"] = h5py.version.hdf5_version
    return {**found, "mpi": mpi} if mpi else found


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that may be recorded, by name in alphabetical order."""
    return {name: environ[name][:MOST_VALUE] for name in sorted(environ) if _is_allowed(name)}


def _is_allowed(name: str) -> bool:
    if name == EXCEPTION:
        return True
    return (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not FORBIDDEN.search(name)


def slurm(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The SLURM job, by names of its variables; nothing without SLURM."""
    return {name: environ[name][:MOST_VALUE] for name in SLURM if name in environ}


def pbs(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The PBS job, likewise; nothing outside of PBS."""
    return {name: environ[name][:MOST_VALUE] for name in PBS if name in environ}


def command(words: Sequence[str] | None = None) -> dict[str, object]:
    """The command, with `SET` for keys and passwords, and the folder where it was started."""
    given = sys.orig_argv if words is None else words
    return {
        "words": [word[:MOST_VALUE] for word in hide_in_words(given)],
        "folder": str(Path.cwd()),
        "pid": os.getpid(),
    }
