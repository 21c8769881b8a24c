"""Programs that want torch's variables, started by mpirun: they meet by env://, and one that fails ends all."""

import re
import subprocess
import sys

import pytest

from mpispeed.launch.mpirun import find_mpirun

GLOO = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["LOCAL_RANK"])])
dist.all_reduce(total)
os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}: {total.item():g} {'mpi4py.MPI' in sys.modules}\\n".encode())
dist.destroy_process_group()
"""
SHOW = """
import os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
if len(sys.argv) > 1 and os.environ["RANK"] == "2":
    print("last words")
    sys.exit(3) if sys.argv[1] == "exit" else 1 / 0
time.sleep(300 if len(sys.argv) > 1 else 0)
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def check(done):
    """Three ranks on this machine, with one port."""
    assert done.returncode == 0, done.stderr
    port = re.search(r"127\.0\.0\.1 (\d+)", done.stdout)[1]
    assert sorted(done.stdout.splitlines()) == [f"{rank} 3 {rank} 3 0 127.0.0.1 {port}" for rank in range(3)]


def test_torch_meets_by_its_variables_without_mpi(job, script):
    done = job(3, "--torch-env", script(GLOO))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 3: 3 False" for rank in range(3)]


def test_programs_without_the_runner(job, script):
    check(job(3, "--torch-env", "--no-python", sys.executable, script(SHOW)))


@pytest.mark.parametrize("form", ["exec", "eval"])
def test_env_under_plain_mpirun(script, form):
    env = f"{sys.executable} -m mpispeed env"
    words = {
        "exec": [*env.split(), "--", sys.executable, script(SHOW)],
        "eval": ["bash", "-c", f'eval "$({env})"; {sys.executable} {script(SHOW)}; true'],
    }[form]
    argv = [find_mpirun().path, "-n", "3", *words]
    check(subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False))


@pytest.mark.parametrize(("how", "code", "words"), [("exit", 3, ""), ("raise", 1, "ZeroDivisionError")])
def test_rank_that_fails_without_mpi_ends_the_others(job, script, how, code, words):
    done = job(3, "--torch-env", script(SHOW), how, limit_seconds=200)
    assert done.returncode == code
    assert "last words\n" in done.stdout
    assert words in done.stderr
    assert "MPI_Init" not in done.stderr
