"""Compiles the device's C++ against the torch that is installed, once for each state of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

_SOURCES = Path(__file__).parent / "csrc"
# -O1: these files call torch's kernels and have no loops of their own.
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-DAT_PER_OPERATOR_HEADERS"]


def built_library() -> Path:
    """Path of the library; where several processes ask at once, one compiles and the others wait."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.fail("g++ is missing, and the tests' device is compiled with it; install it")
    folder = Path(tempfile.gettempdir()) / f"mpispeed-device-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.lstat().st_uid == os.getuid(), f"{folder} belongs to somebody else; name another in TMPDIR"
    library = folder / f"standin-{_digest()}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(compiler, library)
    return library


def _digest() -> str:
    words = hashlib.sha256(" ".join([torch.__version__, torch.__file__, *_FLAGS]).encode())
    for path in sorted(_SOURCES.iterdir()):
        words.update(path.name.encode() + path.read_bytes())
    return words.hexdigest()[:16]


def _build(compiler: str, library: Path) -> None:
    home = Path(torch.__file__).parent
    include = [f"-isystem{home / 'include'}", f"-isystem{home / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as place:

        def compiled(source: Path) -> str:
            out = f"{place}/{source.stem}.o"
            _run([compiler, *_FLAGS, *include, "-c", str(source), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sorted(_SOURCES.glob("*.cpp"))))
        made = f"{place}/standin.so"
        libraries = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([compiler, "-shared", *objects, *libraries, "-o", made])
        Path(made).replace(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"the tests' device does not compile:\n{done.stderr[-6000:]}"
