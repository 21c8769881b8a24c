"""Every kernel of the catalog runs under a checker of memory: compiled for the host, each access is checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.cuda_host import LIBRARY, library_path
from tests.helpers.system import cannot

ROOT = Path(__file__).resolve().parents[3]
# Fibers have stacks of their own, which the checker of stacks does not know; Python keeps memory until its end.
OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0:exitcode=99"


def checked(*words):
    compiler = shutil.which("g++") or cannot("g++ is missing")
    asked = [compiler, "-print-file-name=libasan.so"]
    found = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        cannot("the compiler has no library of its address sanitizer")
    library = library_path(is_checked=True)  # here, because the compiler does not run under the checker
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        LIBRARY: str(library),
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": OPTIONS,
    }
    command = [sys.executable, "-m", "tests.helpers.every_face", "host", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)


def test_every_kernel_stays_within_its_memory():
    done = checked()
    assert done.returncode == 0, done.stderr[-6000:]


def test_the_checker_finds_a_write_past_the_end():
    done = checked("fault")
    assert done.returncode == 99, done.stderr[-2000:]
    assert "heap-buffer-overflow" in done.stderr
    assert "row_sources" in done.stderr
