"""Whole jobs, started as a user starts them: `mpispeed run` in a child process with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Job = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def job() -> Job:
    """Runs `mpispeed run -n RANKS SCRIPT ARGS...`; a job that outlives its limit is killed and fails the test."""

    def run(ranks: int, *command: object, limit_seconds: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), *map(str, command)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"job on {ranks} ranks still ran after {limit_seconds} s\n{out}\n{err}")
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    return run
