"""What a newcomer does wrong at the start of a job, and the sentence it ends with.

Elsewhere: wrong keys, types, batches, a missing config and configs that differ in test_bad_input, a missing script in
unit/cli/test_main, a full disk in test_drills, an NVMe folder in mpi/offload, `srun --mpi=none` in tests/slurm.
"""

import os
import signal
import subprocess
import sys

import pytest

from mpispeed.launch.mpirun import Family, find_mpirun
from tests.helpers.system import CHECKOUT

LATE_SECONDS = 400
"""As for other jobs: what takes seconds on an idle machine takes minutes beside other tests."""

SCRIPT = """
import os, sys, time
import torch
import mpispeed

engine, *_ = mpispeed.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})
print("began", engine.global_rank, flush=True)


def work():
    if sys.argv[1] == "raise" and engine.global_rank == 1:
        raise ValueError("planted")
    if sys.argv[1] == "die" and engine.global_rank == 1:
        os.kill(os.getpid(), 9)
    while sys.argv[1] == "long":
        time.sleep(0.1)
    mpispeed.comm.barrier()


work()
"""


@pytest.fixture
def script(tmp_path):
    """A script in a folder of its own, where a job that fails may leave something."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def call(tmp_path):
    """Starts a command in that folder; returns the process."""
    started = []

    def run(*words, **env):
        process = subprocess.Popen(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT, **env}, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_torchrun_is_refused_once_with_the_command_to_use(call, script):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", script, "long"]
    out, err = call(sys.executable, *words).communicate(timeout=LATE_SECONDS)
    assert "began" not in out
    assert err.count("mpispeed: error:") == 1, err
    assert "torchrun started 2 processes (WORLD_SIZE=2)" in err
    assert f"Start with: mpispeed run -n 2 {script} ARGUMENTS" in err
    assert "exitcode  : 2" in err  # of the worker; torchrun itself always ends with 1


def test_the_mpirun_of_another_mpi_is_refused_in_a_sentence(call, script):
    """One process with what Open MPI's mpirun would give it, or MPICH's, whichever this Python does not have."""
    foreign = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    foreign = {"PMI_SIZE": "2", "PMI_RANK": "0"} if find_mpirun().family is Family.OPEN_MPI else foreign
    process = call(sys.executable, script, "long", **foreign)
    out, err = process.communicate(timeout=LATE_SECONDS)
    assert (process.returncode, out) == (2, ""), err
    assert err.startswith("mpispeed: error: the launcher started 2 processes"), err
    assert "different MPIs. Start with " in err
    assert err.count("\n") == 1


def test_an_error_on_one_rank_shows_the_script_and_nothing_else(job, script):
    done = job(2, script, "raise", cwd=script.parent)
    assert done.returncode == 1, done.stderr
    begin = done.stderr.index("mpispeed: uncaught error on rank 1; ending the job\n")
    lines = done.stderr[begin:].splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2] == f'  File "{script}", line 20, in <module>'
    assert lines[-1] == "ValueError: planted"  # MPI adds nothing
    assert [path.name for path in script.parent.iterdir()] == [script.name]  # no report: there is nothing to look for


def test_ctrl_c_is_one_line_of_ours(call, script):
    process = call(sys.executable, "-m", "mpispeed.cli.main", "run", "-n", "2", script, "long")
    assert {process.stdout.readline() for _ in range(2)} == {"began 0\n", "began 1\n"}
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LATE_SECONDS)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith("nothing is wrong; start again when you like")
    assert err.count("interrupted (Ctrl-C)") == 1
    assert [path.name for path in script.parent.iterdir()] == [script.name]


def test_a_killed_rank_leaves_its_report_before_the_command_returns(job, script):
    done = job(2, script, "die", cwd=script.parent)
    assert done.returncode != 0
    assert "mpispeed: the job ended because rank " in done.stderr
    assert len(list(script.parent.glob("mpispeed_reports/*/report.txt"))) == 1
    assert sorted(path.name for path in script.parent.iterdir()) == ["mpispeed_reports", script.name]
