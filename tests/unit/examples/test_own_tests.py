"""The example of a test of one's own model: skipped alone, run by two ranks."""

import os
import subprocess
import sys
from pathlib import Path

from mpispeed.launch.mpirun import find_mpirun

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "test_model.py"


def pytest_of(*words, launcher=()):
    command = [*launcher, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, EXAMPLE.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLE.parent, env=os.environ)
    return done.returncode, done.stdout


def test_the_example_is_skipped_without_mpi():
    code, said = pytest_of()
    assert code == 0 and "1 skipped" in said


def test_the_example_passes_on_two_ranks():
    code, said = pytest_of("--with-mpi", launcher=(str(find_mpirun().path), "-n", "2"))
    assert code == 0, said
    assert said.count("1 passed") == 2
