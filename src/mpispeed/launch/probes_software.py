"""Probe of the software: Python, torch, compiled modules, HDF5, CUDA."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator

from mpispeed.base.errors import NativeMissing
from mpispeed.base.version import VERSION
from mpispeed.launch.findings import Finding, Verdict
from mpispeed.launch.probes import ask
from mpispeed.native.cuda import toolchain

AREA = "software"
SECONDS = 120.0

_TORCH = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if gpu else []}))
"""
_HDF5 = """
import json, h5py
print(json.dumps({"h5py": h5py.version.version, "hdf5": h5py.version.hdf5_version}))
"""
_NATIVE = """
import json
from mpispeed.native import status
print(json.dumps([[c.name, c.is_usable, c.reason or c.purpose] for c in status.report()]))
"""
_NCCL = """
import json, torch
from mpispeed.mesh.backends.nccl_library import library_for
found = library_for(torch.device("cuda"))
print(json.dumps(f"{found} at {found.path}"))
"""
_KERNELS = """
import json
from mpispeed.native.cuda import launcher
reason, said = launcher.unusable_reason(), ""
if not reason:
    import torch
    from mpispeed.native.device_check import run
    said = run(torch.cuda.current_device())
print(json.dumps({"reason": reason, "said": said}))
"""


def check_software() -> Iterator[Finding]:
    """All findings of this area."""
    yield Finding(AREA, "mpispeed", Verdict.OK, VERSION)
    yield Finding(AREA, "Python", Verdict.OK, f"{platform.python_version()} at {sys.executable}")
    yield from _check_torch()
    yield from _check_hdf5()
    yield from _check_compiled()
    yield from _check_cuda()


def _check_torch() -> Iterator[Finding]:
    found, reason = ask(["-c", _TORCH], seconds=SECONDS)
    if not isinstance(found, dict):
        cure = "install torch 2.8 or newer into the environment of this Python"
        yield Finding(AREA, "torch", Verdict.FAIL, reason, cure)
        return
    yield Finding(AREA, "torch", Verdict.OK, f"{found['version']}, {found['threads']} threads")
    if found["gpus"]:
        names = ", ".join(found["gpus"])
        yield Finding(AREA, "GPU", Verdict.OK, f"{len(found['gpus'])} seen by torch: {names}")
        yield from _check_kernels()
        said, reason = ask(["-c", _NCCL], seconds=SECONDS)
        verdict = Verdict.OK if isinstance(said, str) else Verdict.INFO
        yield Finding(AREA, "NCCL", verdict, said if isinstance(said, str) else f"none that can be used ({reason})")
    elif found["cuda"] is None:
        yield Finding(AREA, "GPU", Verdict.INFO, "no GPU for torch: it is built for the CPU only")
    else:
        what = f"no GPU: torch is built for CUDA {found['cuda']} and sees no device"
        yield Finding(AREA, "GPU", Verdict.INFO, what, "where there is one, load its driver or ask SLURM for it")


def _check_hdf5() -> Iterator[Finding]:
    found, reason = ask(["-c", _HDF5], seconds=SECONDS)
    if isinstance(found, dict):
        yield Finding(AREA, "HDF5", Verdict.OK, f"{found['hdf5']} in h5py {found['h5py']}")
    else:
        yield Finding(AREA, "HDF5", Verdict.FAIL, reason, "checkpoints need it: pip install h5py")


def _check_compiled() -> Iterator[Finding]:
    found, reason = ask(["-c", _NATIVE], seconds=SECONDS)
    if not isinstance(found, list):
        yield Finding(AREA, "compiled modules", Verdict.WARN, reason, "install mpispeed again with a C compiler")
        return
    for name, is_usable, detail in found:
        cure = "" if is_usable else "slower torch code takes over; install mpispeed again with a C compiler"
        yield Finding(AREA, f"compiled {name}", Verdict.OK if is_usable else Verdict.WARN, detail, cure)


def _check_cuda() -> Iterator[Finding]:
    try:
        nvcc = toolchain.find_nvcc()
        yield Finding(AREA, "nvcc", Verdict.OK, f"{toolchain.version(nvcc)} at {nvcc}")
    except NativeMissing as error:
        what, _, cure = str(error).partition("; ")
        yield Finding(AREA, "nvcc", Verdict.INFO, what, cure)
    has_pycuda = importlib.util.find_spec("pycuda") is not None
    yield Finding(
        AREA, "pycuda", Verdict.OK if has_pycuda else Verdict.INFO, "installed" if has_pycuda else "not installed",
        "" if has_pycuda else 'only for CUDA kernels: pip install "mpispeed[cuda]"',
    )  # fmt: skip


def _check_kernels() -> Iterator[Finding]:
    """Check that a kernel runs on the GPU, in a process of its own."""
    found, reason = ask(["-c", _KERNELS], seconds=SECONDS)
    if isinstance(found, dict) and not found["reason"]:
        yield Finding(AREA, "fused kernels", Verdict.OK, found["said"])
        return
    what = found["reason"] if isinstance(found, dict) else reason
    yield Finding(AREA, "fused kernels", Verdict.WARN, what, "slower torch code takes over")
