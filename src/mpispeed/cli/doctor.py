"""`mpispeed doctor`: what is usable on this machine, and why the rest is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import click

from mpispeed.base.errors import MpispeedError
from mpispeed.launch.env import usable_cores
from mpispeed.launch.mpirun import Mpirun, find_mpirun, mpirun_argv

# Each probe runs in a process of its own: a library that crashes at import must not take the report with it.
_TORCH = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if gpu else []}))
"""
_MPI = """
import json
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled",
          MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}
print(json.dumps({"library": MPI.Get_library_version().split("\\n")[0].strip(" \\0"),
    "standard": "%d.%d" % MPI.Get_version(), "threads": levels[MPI.Query_thread()]}))
"""
# One write for a line: print makes two of it, and those of several ranks mix.
_WORLD = "import os; from mpi4py import MPI; os.write(1, b'%d\\n' % MPI.COMM_WORLD.size)"
_HDF5 = """
import json, h5py
print(json.dumps({"h5py": h5py.version.version, "hdf5": h5py.version.hdf5_version}))
"""
_NATIVE = """
import json
from mpispeed.native import status
print(json.dumps([[c.name, c.is_usable, c.reason or c.purpose] for c in status.report()]))
"""
_IO = """
import json
from dataclasses import asdict
from mpispeed.native.block_probe import kernel_refusal, probe
print(json.dumps([asdict(probe(".")), kernel_refusal("uring")]))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `is_needed` marks what no run can do without."""

    name: str
    is_usable: bool
    detail: str
    is_needed: bool = False


def _answer(code: str) -> tuple[object, str]:
    """(decoded answer, "") of a probe, or (None, the reason why there is none)."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return None, "no answer within 120 s"
    try:
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    except (IndexError, ValueError):
        lines = [line for line in done.stderr.strip().splitlines() if line]
        return None, lines[-1] if lines else f"ended with exit code {done.returncode}"


def _check_python() -> Iterable[Finding]:
    yield Finding("mpispeed", True, importlib.metadata.version("mpispeed"), True)
    yield Finding("Python", True, f"{platform.python_version()} at {sys.executable}", True)
    cores, total = usable_cores(), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    yield Finding("cores", True, f"{cores} of {total} usable by this process; OMP_NUM_THREADS {threads}")


def _check_torch() -> Iterable[Finding]:
    found, reason = _answer(_TORCH)
    if not isinstance(found, dict):
        yield Finding("torch", False, reason, True)
        return
    yield Finding("torch", True, f"{found['version']}, {found['threads']} threads", True)
    if found["gpus"]:
        yield Finding("GPU", True, f"{len(found['gpus'])} seen by torch: {', '.join(found['gpus'])}")
    elif found["cuda"] is None:
        yield Finding("GPU", False, "this torch is built for the CPU only")
    else:
        yield Finding(
            "GPU", False, f"torch is built for CUDA {found['cuda']} but sees no device; is the driver loaded?"
        )


def _check_mpi() -> Iterable[Finding]:
    found, reason = _answer(_MPI)
    if isinstance(found, dict):
        text = f"{' '.join(found['library'].split())}, MPI {found['standard']}, threads {found['threads']}"
        yield Finding("MPI library", True, text, True)
    else:
        yield Finding("MPI library", False, reason, True)
    try:
        mpirun = find_mpirun()
    except MpispeedError as error:
        yield Finding("mpirun", False, str(error), True)
        return
    yield Finding("mpirun", True, f"{mpirun.family.value} at {mpirun.path}", True)
    if found is not None:
        yield _check_world(mpirun)


def _check_world(mpirun: Mpirun) -> Finding:
    """Start two ranks: with a launcher of another MPI each would find itself alone, without an error."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    argv = mpirun_argv(mpirun, 2, [sys.executable, "-c", _WORLD], cores=1, is_root=is_root)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding("world of 2", False, "two ranks did not start within 60 s", True)
    sizes = done.stdout.split()
    if sizes == ["2", "2"]:
        return Finding("world of 2", True, "mpirun and the MPI library fit", True)
    if sizes == ["1", "1"]:
        cure = "set MPI4PY_MPIABI or MPI4PY_LIBMPI, or use the mpirun of that library"
        return Finding(
            "world of 2", False, f"each rank is alone: mpirun and library are of different MPIs; {cure}", True
        )
    lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    return Finding("world of 2", False, lines[-1], True)


def _check_compiled() -> Iterable[Finding]:
    found, reason = _answer(_NATIVE)
    if not isinstance(found, list):
        yield Finding("compiled modules", False, reason)
        return
    for name, is_usable, detail in found:
        yield Finding(f"compiled {name}", is_usable, detail)


def _check_io() -> Iterable[Finding]:
    """Asynchronous I/O in the current folder; where it is not the best, the reason."""
    found, reason = _answer(_IO)
    if not isinstance(found, list):
        yield Finding("block I/O", False, reason)
        return
    here, uring_reason = found
    what = f'backend "{here["backend"]}" in {here["folder"]}, blocks of {here["alignment"]} bytes'
    yield Finding("block I/O", True, f"{what}; {here['backend_reason']}" if here["backend_reason"] else what)
    yield Finding("O_DIRECT", here["is_direct"], here["direct_reason"] or "granted in this folder")
    yield Finding("io_uring", not uring_reason, uring_reason or 'usable when named as backend "uring"')
    limit = here["mlock_limit"]
    enough = limit is None or limit >= 1 << 30
    said = "unlimited" if limit is None else f"{limit} bytes"
    advice = "" if enough else "; raise it with `ulimit -l` or in limits.conf for page-locked buffers"
    yield Finding("locked memory", enough, f"RLIMIT_MEMLOCK is {said}{advice}")


def _check_files() -> Iterable[Finding]:
    found, reason = _answer(_HDF5)
    if isinstance(found, dict):
        yield Finding("HDF5", True, f"{found['hdf5']} in h5py {found['h5py']}", True)
    else:
        yield Finding("HDF5", False, reason, True)


def _check_cuda() -> Iterable[Finding]:
    nvcc = find_nvcc()
    yield Finding("nvcc", nvcc is not None, nvcc or "not on PATH nor under CUDA_HOME; CUDA kernels cannot be compiled")
    has_pycuda = importlib.util.find_spec("pycuda") is not None
    yield Finding("pycuda", has_pycuda, "installed" if has_pycuda else 'not installed; pip install "mpispeed[cuda]"')


def _check_slurm() -> Iterable[Finding]:
    job = os.environ.get("SLURM_JOB_ID")
    if shutil.which("srun") is None:
        yield Finding("SLURM", False, "no srun on PATH")
    else:
        yield Finding("SLURM", True, f"inside job {job}" if job else "srun is there; not inside a job")


def find_nvcc() -> str | None:
    """Path of the CUDA compiler: on PATH, or under CUDA_HOME."""
    folders = [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]  # noqa: PTH118
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders) or os.devnull)


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    _check_python,
    _check_torch,
    _check_mpi,
    _check_files,
    _check_compiled,
    _check_io,
    _check_cuda,
    _check_slurm,
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write the findings as JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show what is usable on this machine, and why the rest is not.

    The exit code is 1 when something is missing that no run can do without.
    """
    findings = [finding for check in CHECKS for finding in check()]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    ctx.exit(int(any(finding.is_needed and not finding.is_usable for finding in findings)))


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "ok" if finding.is_usable else ("MISSING" if finding.is_needed else "-")
        click.echo(f"{mark:8}{finding.name:{width}}  {finding.detail}")
