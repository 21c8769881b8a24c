"""Nodes that go out of service while jobs run on them."""

import sys
from pathlib import Path

RANKS = Path(__file__).with_name("ranks.py")


class Held:
    """A job that runs until it is let go."""

    def __init__(self, slurm, name, **options):
        self.slurm, self.file = slurm, slurm.jobs / f"{name}-may-end"
        start = f"srun --mpi=pmi2 {sys.executable} -m mpi4py {RANKS} hold {self.file}"
        self.job = slurm.submit(start, nodes=1, time=20, **options)

    def wait_for_starts(self, count):
        self.slurm.wait(self.job, until=lambda _: self.slurm.output(self.job).count("begins") == count)

    def end(self):
        self.file.touch()
        assert self.slurm.wait(self.job) == "COMPLETED", self.slurm.output(self.job)
        return self.slurm.run("scontrol", "show", "job", self.job).stdout


def test_drained_node_finishes_its_job_and_takes_no_other(slurm):
    first = Held(slurm, "first", nodelist="n1")
    first.wait_for_starts(1)
    slurm.drain("n1")
    second = Held(slurm, "second")
    second.wait_for_starts(1)
    assert "BatchHost=n1" in first.end()
    assert "BatchHost=n2" in second.end()
    assert "rank 0 ends on" in slurm.output(first.job)


def test_job_of_a_lost_node_starts_again_on_another(slurm):
    held = Held(slurm, "lost", requeue=True)
    held.wait_for_starts(1)
    lost = slurm.run("squeue", "--noheader", f"--jobs={held.job}", "--format=%N").stdout.strip()
    slurm.drain(lost, ends_jobs=True)
    held.wait_for_starts(2)
    about = held.end()
    assert "Restarts=1" in about
    assert f"BatchHost={lost}" not in about
    assert slurm.output(held.job).count("ends on") == 1
