"""Whole jobs, started as a user starts them: `mpispeed run` in a child process with a time limit; so has each test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.system import CHECKOUT

ROOT = Path(__file__).resolve().parents[2]

# Of one test; its jobs have their own, shorter ones. `make soak` and `make matrix` ask for more on purpose.
TEST_SECONDS = 1200
LATE_SECONDS = 400
"""A job that still runs is stuck: what takes seconds on an idle machine takes minutes beside other tests."""

IS_LONG_RUN = "MPISPEED_SOAK_KILLS" in os.environ or os.environ.get("MPISPEED_MATRIX") == "full"

Job = Callable[..., subprocess.CompletedProcess[str]]


class TooLong(BaseException):
    """The limit of a test is over; no `except Exception` on the way swallows it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """End a test that outlives its limit, whatever it waits for."""
    if IS_LONG_RUN:
        return (yield)

    def late(*_: object) -> None:
        message = f"the test still ran after {TEST_SECONDS} s"
        raise TooLong(message)

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.fixture(scope="session")
def job() -> Job:
    """Runs `mpispeed run -n RANKS SCRIPT ARGS...`; a job that outlives its limit is killed and fails the test."""

    def run(
        ranks: int, *command: object, limit_seconds: float = LATE_SECONDS, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), *map(str, command)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT, **env}
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
            cwd=cwd,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"job on {ranks} ranks still ran after {limit_seconds} s\n{out}\n{err}")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    return run
