"""Compiles the device's C++ against the torch that is installed, once for each state of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
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
        # One unit: reading torch's headers takes most of the time, and is done once so.
        whole, made = Path(place, "standin.cpp"), Path(place, "standin.so")
        whole.write_text("".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp"))))
        libraries = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([compiler, *_FLAGS, *include, "-shared", str(whole), *libraries, "-o", str(made)])
        made.replace(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"the tests' device does not compile:\n{done.stderr[-6000:]}"
