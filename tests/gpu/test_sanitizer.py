"""Every kernel under compute-sanitizer, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.system import CHECKOUT

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": CHECKOUT}
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


def sanitizer():
    found = shutil.which("compute-sanitizer") or next((path for path in PLACES if Path(path).is_file()), None)
    return found or pytest.skip("compute-sanitizer is not installed")


def left_out(tool):
    """Options by which torch's own kernels are not looked at, which takes most of the time.

    With initcheck they have to be: what they write would count as never written.
    """
    return [] if tool == "initcheck" else ["--kernel-name-exclude", "kns=_ZN2at"]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_clean(device, tool):
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "99", *left_out(tool)]
    words = [sys.executable, "-m", "tests.helpers.every_face", "cuda"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=540)
    said = (done.stdout + done.stderr)[-6000:]
    if "Device not supported" in said:
        pytest.skip(f"compute-sanitizer does not work on this machine: {said[-300:]}")
    assert done.returncode == 0, said


def test_a_write_past_the_end_is_found(device):
    words = [sanitizer(), "--tool", "memcheck", "--error-exitcode", "99", sys.executable]
    # Without torch's own allocator, which hands out larger pieces than were asked for.
    command = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *words, "-m", "tests.helpers.every_face", "cuda", "fault"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=540)
    said = (done.stdout + done.stderr)[-6000:]
    if "Device not supported" in said:
        pytest.skip(f"compute-sanitizer does not work on this machine: {said[-300:]}")
    assert done.returncode == 99, said
