"""Every way out of a job ends all its ranks, with the right exit code and one message."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpispeed.launch.mpirun import find_mpirun

WORKER = Path(__file__).with_name("exits_worker.py")

WAYS = {
    "fine": (0, "", 0),
    "exit": (3, "left with exit code 3", 1),
    "raise": (3, "left with exit code 3", 1),
    "raise_text": (1, "no data here", 1),
    "caught": (0, "rank 0 wrote its results", 1),
    "exit_all": (4, "", 0),
    "usage": (2, "unrecognized arguments: --unknown", 1),
    "config_all": (2, "mpispeed: error: micro batch 3 does not fit", 1),
    "config_one": (2, "mpispeed: error: only here", 1),
    "comm": (2, "mpispeed: error: buffers do not fit (rank 2)", 1),
    "agree": (2, "mpispeed: error: rank 2 of 3: disk full", 1),
    "thread": (1, "ZeroDivisionError: planted in a thread", 1),
}


# on three ranks where the message counts them, or where one that neither fails nor is rank 0 has to end too
ON_THREE = ("exit", "config_all", "comm", "agree", "thread")


@pytest.mark.parametrize("how", WAYS)
def test_way_out(job, how):
    code, words, times = WAYS[how]
    done = job(3 if how in ON_THREE else 2, WORKER, how)
    assert done.returncode == code, done.stderr
    assert not words or done.stderr.count(words) == times, done.stderr
    assert done.stderr.count("Traceback") == (1 if how == "thread" else 0), done.stderr


@pytest.mark.parametrize(("how", "runner"), [("exit", []), ("caught", []), ("raise", ["-m", "mpi4py"])])
def test_way_out_under_plain_mpirun(how, runner):
    code, words, times = WAYS[how]
    argv = [find_mpirun().path, "-n", "2", sys.executable, *runner, WORKER, how]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(words) == times, done.stderr
