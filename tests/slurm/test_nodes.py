"""Nodes that go out of service while jobs run on them."""

import sys
import time
from pathlib import Path

RANKS = Path(__file__).with_name("ranks.py")
START = f"srun --mpi=pmi2 {sys.executable} -m mpi4py {RANKS} sleep"


def running_on(slurm, job):
    return slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").stdout.strip()


def test_drained_node_finishes_its_job_and_takes_no_other(slurm):
    first = slurm.submit(f"{START} 4", nodes=1, nodelist="n1", time=2)
    slurm.wait(first, 30, until=lambda state: state == "RUNNING")
    slurm.drain("n1")
    second = slurm.submit(f"{START} 1", nodes=1, time=2)
    slurm.wait(second, 30, until=lambda state: state != "PENDING")
    assert slurm.wait(first, 60) == slurm.wait(second, 60) == "COMPLETED"
    assert "rank 0 ends on" in slurm.output(first)
    hosts = [slurm.run("scontrol", "show", "job", job).stdout.split("BatchHost=")[1].split()[0] for job in
             (first, second)]  # fmt: skip
    assert hosts == ["n1", "n2"]


def test_job_of_a_lost_node_starts_again_on_another(slurm):
    job = slurm.submit(f"{START} 6", nodes=1, time=2, requeue=True)
    deadline = time.monotonic() + 30
    while "begins" not in slurm.output(job):
        assert time.monotonic() < deadline, slurm.output(job)
        time.sleep(0.1)
    lost = running_on(slurm, job)
    slurm.drain(lost, ends_jobs=True)
    assert slurm.wait(job, 120) == "COMPLETED", slurm.output(job)
    about = slurm.run("scontrol", "show", "job", job).stdout
    assert "Restarts=1" in about
    assert f"BatchHost={lost}" not in about
    assert slurm.output(job).count("begins") == 2
    assert slurm.output(job).count("ends on") == 1
