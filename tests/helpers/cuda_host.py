"""Kernels of cuda/ compiled for the host, and a launcher that runs them on tensors in host memory."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mpispeed._native.launch import Launch, Queue
from mpispeed.native.cuda.catalog import KERNELS, sources
from mpispeed.native.cuda.launcher import leading_pointers, packed
from mpispeed.native.cuda.store import source_digest

ROOT = Path(__file__).resolve().parents[2]
HEADER = Path(__file__).parent / "cuda_host" / "mpispeed_cuda_host.h"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
LIBRARY = "MPISPEED_HOST_LIBRARY"
"""A file of `library_path` to use; its kernels may have checks of every access."""

_RESULTS = {1: "there is no such kernel", 2: "its arguments are not those of the catalog"}


_NAMES = list(KERNELS)
_ENTRY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)


class HostLauncher:
    """Runs a kernel as a loop over blocks, with fibers where it has barriers; warps in order, or in reverse.

    Launches come through the compiled module as on a device: only the driver's entry point is one of ours.
    """

    processors = 4

    def __init__(self, *, is_reversed: bool = False) -> None:
        library = host_library()
        self._launch, self._reverse, self._is_reversed = (
            library.mpispeed_host_launch,
            library.mpispeed_host_reverse,
            is_reversed,
        )
        self.launched: list[str] = []
        self.kept: dict[Any, Any] = {}
        self._errors: list[Exception] = []
        self._entry = _ENTRY(self._enter)
        entry = ctypes.cast(self._entry, ctypes.c_void_p).value
        self._queue = Queue(entry or 0, 0, 0, lambda device: 0, 0, nullcontext, self._failed)

    def launch(
        self, kernel: str, grid: tuple[int, int, int], threads: tuple[int, int, int], *args: Any, shared_bytes: int = 0
    ) -> None:
        self._queue.run(kernel, 1 + _NAMES.index(kernel), grid, threads, shared_bytes, packed(kernel, args))

    def prepare(
        self, kernel: str, grid: tuple[int, int, int], threads: tuple[int, int, int], tail: bytes = b"",
        shared_bytes: int = 0, seed_at: int = -1,
    ) -> Launch:  # fmt: skip
        pointers = leading_pointers(kernel, tail)
        function = 1 + _NAMES.index(kernel)
        return Launch(self._queue, kernel, function, grid, threads, shared_bytes, pointers, tail, seed_at)

    def _enter(self, function: int, *sizes: Any) -> int:
        """As `cuLaunchKernel`: an exception must not leave it."""
        *shape, shared, _stream, _params, extra = sizes
        try:
            length = ctypes.c_size_t.from_address(extra[3])
            self._run(_NAMES[function - 1], shape[:3], shape[3:], shared, ctypes.string_at(extra[1], length.value))
        except Exception as error:
            self._errors.append(error)
            return 1
        return 0

    def _failed(self, name: str, code: int) -> NoReturn:
        raise self._errors.pop()

    def _run(self, kernel: str, grid: list[int], threads: list[int], shared_bytes: int, words: bytes) -> None:
        triple = ctypes.c_uint * 3
        assert all(grid), f"{kernel}: a grid of {grid} blocks, which a device refuses"
        assert threads[0] * threads[1] * threads[2] <= 1024, f"{kernel}: {threads} threads in a block"
        assert grid[1] < 65536, f"{kernel}: {grid} blocks"
        assert grid[2] < 65536, f"{kernel}: {grid} blocks"
        assert shared_bytes <= 48 * 1024, f"{kernel}: {shared_bytes} bytes of dynamic shared memory"
        self._reverse(int(self._is_reversed))
        size, count = ctypes.c_size_t(shared_bytes), ctypes.c_size_t(len(words))
        result = self._launch(kernel.encode(), triple(*grid), triple(*threads), size, words, count)
        assert result == 0, f"{kernel}: {_RESULTS.get(result, result)}"
        self.launched.append(kernel)


@cache
def host_library() -> ctypes.CDLL:
    """All kernels of the catalog as a library for the host; compiled once for each state of the sources."""
    return ctypes.CDLL(os.environ.get(LIBRARY) or str(library_path()))


def library_path(*, is_checked: bool = False) -> Path:
    """The file of that library, made if it is missing; with checks of every access if wanted."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.fail("g++ is missing, and kernels are tested on the host by compiling them with it; install it")
    flags = [*FLAGS, "-O1", "-g1", "-fsanitize=address"] if is_checked else FLAGS
    words = source_digest() + hashlib.sha256(HEADER.read_bytes()).hexdigest() + " ".join(flags + sources())
    key = hashlib.sha256(words.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"mpispeed-host-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.lstat().st_uid == os.getuid()
    library = folder / f"kernels-{key}.so"
    with (folder / f"lock-{int(is_checked)}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            assert "LD_PRELOAD" not in os.environ, "a checker that is loaded first would check the compiler"
            _build(compiler, library, flags)
    return library


def _with_headers(path: Path) -> bytes:
    """A source and the headers of cuda/include that it asks for, so that no other header makes it compile again."""
    text = path.read_text()
    names = re.findall(r'#include "(\w+\.cuh)"', text)
    return text.encode() + b"".join(_with_headers(ROOT / "cuda" / "include" / name) for name in names)


def _build(compiler: str, library: Path, flags: list[str]) -> None:
    include = [f"-I{ROOT / 'cuda' / 'include'}", f"-I{HEADER.parent}"]
    shared_words = HEADER.read_bytes() + " ".join(flags).encode()
    with tempfile.TemporaryDirectory(dir=library.parent) as place:

        def compiled(source: str) -> str:
            path = ROOT / "cuda" / source
            digest = hashlib.sha256(shared_words + _with_headers(path) + source.encode()).hexdigest()[:16]
            kept = library.parent / f"{path.stem}-{digest}.o"
            if kept.exists():
                return str(kept)
            out = f"{place}/{source.replace('/', '.')}.o"
            command = [compiler, *flags, *include, "-x", "c++", "-c", str(path), "-o", out]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{source} does not compile for the host:\n{done.stderr[-6000:]}"
            Path(out).replace(kept)
            return str(kept)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources()))
        made = f"{place}/kernels.so"
        subprocess.run([compiler, *flags, "-shared", *objects, "-o", made], check=True)
        Path(made).replace(library)
