"""Nvcc: finds it, compiles one source to machine code of one architecture, and reads its report on registers."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpispeed.base import assets
from mpispeed.base.errors import NativeMissing

FLAGS = ("-std=c++17", "-O3", "--fmad=true", "-Xptxas=-v", "-Werror=all-warnings")
"""What every kernel is compiled with. Bits that matter are written with functions that the compiler never fuses."""

_ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")
_LIMIT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one kernel on one architecture: registers per thread, bytes spilled, shared bytes of a block."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


@cache
def find_nvcc() -> Path:
    """The nvcc to use: of MPISPEED_NVCC, CUDA_HOME or CUDA_PATH, of PATH, or of NVIDIA's wheels, in this order.

    Raises:
        NativeMissing: there is none; the message says where it was looked for.
    """
    tried = []
    named = os.environ.get("MPISPEED_NVCC")
    places = [named] if named else []
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places += [str(Path(home) / "bin" / "nvcc") for home in homes]
    on_path = shutil.which("nvcc")
    places += [on_path] if on_path else []
    places += [str(path) for path in _in_wheels()] + ["/usr/local/cuda/bin/nvcc"]
    for place in places:
        if os.access(place, os.X_OK) and Path(place).is_file():
            return Path(place)
        tried.append(place)
        if place == named:
            break
    msg = (
        f"no nvcc: looked at {', '.join(tried)} and on PATH; load the CUDA module of your site, set CUDA_HOME or "
        "MPISPEED_NVCC, or install mpispeed[kernels], which brings nvcc as a wheel"
    )
    raise NativeMissing(msg)


def _in_wheels() -> list[Path]:
    """The nvcc of the wheels: CUDA 13 has it in nvidia/cu13/bin, CUDA 12 in nvidia/cuda_nvcc/bin."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return sorted((path for folder in folders for path in Path(folder).glob("*/bin/nvcc")), reverse=True)


@cache
def version(nvcc: Path) -> str:
    """Release of nvcc, such as "13.0.88".

    Raises:
        NativeMissing: it cannot be run, or its output has no release.
    """
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        msg = f"{nvcc} --version failed: {error}; load another CUDA module, or set MPISPEED_NVCC to another nvcc"
        raise NativeMissing(msg) from error
    found = re.search(r"V(\d+(?:\.\d+)+)", said)
    if found is None:
        msg = f"{nvcc} --version said {said.strip()[-200:]!r}, which names no version; is it nvcc?"
        raise NativeMissing(msg)
    return found[1]


def check_architecture(arch: str) -> None:
    """Check that `arch` is spelled as nvcc spells real architectures.

    Raises:
        ValueError: it is not.
    """
    if not _ARCHITECTURE.fullmatch(arch):
        msg = f"{arch!r} is no architecture; expected one such as sm_80 (A100) or sm_90 (H100)"
        raise ValueError(msg)


def compile_source(source: str, arch: str) -> tuple[bytes, list[Resources]]:
    """Machine code of one file below cuda/ for one architecture, and the resources of its kernels.

    Raises:
        NativeMissing: nvcc is missing, does not know the architecture, or finds an error; the message has its output.
        ValueError: `arch` is no architecture.
    """
    check_architecture(arch)
    nvcc, folder = find_nvcc(), assets.folder("cuda")
    with tempfile.TemporaryDirectory(prefix="mpispeed-nvcc-") as place:
        out = Path(place) / "out.cubin"
        command = [nvcc, f"-arch={arch}", *FLAGS, "-cubin", "-I", folder / "include", "-o", out, folder / source]
        # nvcc makes files of its own beside its output; a shared /tmp is no place for names that can be guessed.
        environment = {**os.environ, "TMPDIR": place}
        try:
            done = subprocess.run(
                [str(word) for word in command], capture_output=True, text=True, timeout=_LIMIT_SECONDS, env=environment
            )
        except (OSError, subprocess.SubprocessError) as error:
            msg = f"{nvcc} could not compile {source} for {arch}: {error}"
            raise NativeMissing(msg) from error
        if done.returncode or not out.exists():
            words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            who = f"{nvcc} ({version(nvcc)})"
            msg = f"{who} could not compile {source} for {arch} (exit code {done.returncode}):\n{words}"
            raise NativeMissing(msg)
        return out.read_bytes(), read_resources(done.stdout + done.stderr)


def read_resources(said: str) -> list[Resources]:
    """Resources of each kernel, from the output of `-Xptxas=-v`."""
    found = []
    blocks = re.split(r"Compiling entry function '(\w+)'", said)[1:]
    for name, words in zip(blocks[::2], blocks[1::2], strict=True):
        spills = [int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", words)]
        registers, shared = re.search(r"Used (\d+) registers", words), re.search(r"(\d+) bytes smem", words)
        found.append(
            Resources(name, int(registers[1]) if registers else 0, sum(spills), int(shared[1]) if shared else 0)
        )
    return sorted(found, key=lambda entry: entry.kernel)
