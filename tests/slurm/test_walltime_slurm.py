"""Runs that outlive their jobs, on a real SLURM: chained, requeued, signalled, cancelled, moved, preempted.

Most of this is waiting: all jobs are submitted when the first test asks, and run side by side.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "jobs" / "walltime_worker.py"
STEPS = 400
SLOWLY = -0.5  # seconds of a step in the first job, which has to be at work still when it is interrupted
SCRIPT = """\
export MPISPEED_RUN_DIR={folder}
srun --mpi=pmi2 --kill-on-bad-exit=1 {python} -m mpi4py {worker} {folder} {steps} {seconds} '{wishes}'
code=$?
echo "arguments: $*"
"""
REQUEUE = """
if grep -q '"state": "interrupted"' {folder}/state.json; then scontrol requeue $SLURM_JOB_ID; fi
"""


class Run:
    """A run, made of one job after another."""

    def __init__(self, slurm, name, seconds=SLOWLY, *arguments, steps=STEPS, end="", wishes=None, **options):
        self.slurm, self.folder = slurm, slurm.jobs / name
        self.folder.mkdir()
        text = (SCRIPT + end + "exit $code\n").format(
            folder=self.folder, python=sys.executable, worker=WORKER, steps=steps, seconds=seconds,
            wishes=json.dumps(wishes or {}),
        )  # fmt: skip
        where = {"nodes": 2, "ntasks_per_node": 1, "time": 20, "job_name": name}
        self.job = slurm.submit(text, *arguments, **{**where, **options})

    @property
    def state(self):
        return json.loads((self.folder / "state.json").read_text())

    @property
    def rows(self):
        file = self.folder / "log.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_steps(self, count):
        self.slurm.wait(self.job, lambda _: len(self.rows) >= count)

    def output(self, job=None):
        return self.slurm.output(job or self.job)

    def next_job(self):
        """The job that was submitted to go on; the state names it no more as soon as that one has begun."""
        found = re.search(r"job (\d+) was submitted", self.output())
        assert found, self.output()
        return found[1]

    def check_is_over(self, expected):
        """The same steps and losses as without any interruption."""
        assert self.state["state"] == "finished", self.state
        assert self.rows == expected


@pytest.fixture(scope="module")
def runs(slurm_cluster):
    """Jobs that have begun, by what happens to them; those that a test interrupts have been interrupted."""
    found = {
        "straight": Run(slurm_cluster, "straight", 0),
        # By --signal, up to a minute early: after 80 to 140 s. Before, the worker has to be ready for it.
        "requeued": Run(slurm_cluster, "requeued", time=3, signal="USR1@40", requeue=True, end=REQUEUE,
                        wishes={"walltime": {"chain": "requeue"}}),
        # After 90 s: a busy machine has begun by then, and has time left for the save.
        "chained": Run(slurm_cluster, "chained", SLOWLY, "one", "two", time=4,
                       wishes={"walltime": {"margin_seconds": 150}}),
        "signalled": Run(slurm_cluster, "signalled", time=20),
        "cancelled": Run(slurm_cluster, "cancelled", time=20),
    }  # fmt: skip
    for name, words in {"signalled": ("--signal=USR1",), "cancelled": ()}.items():
        found[name].wait_for_steps(3)
        slurm_cluster.run("scancel", *words, found[name].job)
    return found


@pytest.fixture(scope="module")
def expected(slurm_cluster, runs):
    """Steps, losses and samples of an unbroken run."""
    run = runs["straight"]
    assert slurm_cluster.wait(run.job) == "COMPLETED", run.output()
    assert run.state["state"] == "finished"
    assert [row[0] for row in run.rows] == list(range(1, STEPS + 1))
    return run.rows


def test_a_signal_interrupts_a_run_and_the_next_job_ends_it(slurm, runs, expected):
    run = runs["signalled"]
    assert slurm.wait(run.job) == "COMPLETED", run.output()
    following = run.next_job()
    assert re.search(r"SIGUSR1 on rank [01]", run.output())
    assert slurm.wait(following) == "COMPLETED", run.output(following)
    run.check_is_over(expected)


def test_a_cancelled_run_is_saved_and_nothing_follows(slurm, runs):
    run = runs["cancelled"]
    assert slurm.wait(run.job) == "CANCELLED"
    state = run.state
    assert (state["state"], state["next_job"]) == ("stopped", ""), run.output()
    assert "cancelled" in state["reason"]
    assert (run.folder / "checkpoints" / state["tag"] / "manifest.json").exists()
    assert "cancelled" not in slurm.run("squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%j").stdout


def test_a_run_that_reaches_its_time_limit_is_saved_and_chained(slurm, runs, expected):
    run = runs["chained"]
    assert slurm.wait(run.job) == "COMPLETED", "ended by itself, before SLURM did: " + run.output()
    assert "by SLURM" in run.output()
    assert "the job ends" in run.output()
    following = run.next_job()
    assert slurm.wait(following) == "COMPLETED", run.output(following)
    assert "arguments: one two" in run.output(following)
    about = slurm.run("scontrol", "show", "job", following).stdout
    assert "NumNodes=2" in about
    assert "JobName=chained" in about
    run.check_is_over(expected)
    assert run.state["first_step"] > 1


def test_a_run_that_slurm_signals_is_requeued(slurm, runs, expected):
    run = runs["requeued"]

    def is_done_again(state):
        return state == "COMPLETED" and "Restarts=1" in slurm.run("scontrol", "show", "job", run.job).stdout

    slurm.wait(run.job, is_done_again)
    assert "SIGUSR1" in run.output()
    assert "was submitted" not in run.output()
    run.check_is_over(expected)


def test_a_run_whose_node_is_drained_goes_on_on_the_other_one(slurm, expected):
    run = Run(slurm, "drained", nodes=1, ntasks_per_node=2, nodelist="n1")
    run.wait_for_steps(3)
    slurm.drain("n1")
    steps = len(run.rows)
    run.wait_for_steps(steps + 2)  # a drained node lets its jobs go on
    (run.folder / "SAVE").touch()
    slurm.wait(run.job, lambda _: not (run.folder / "SAVE").exists())
    slurm.run("scancel", "--signal=USR1", run.job)
    assert slurm.wait(run.job) == "COMPLETED", run.output()
    following = run.next_job()
    assert slurm.wait(following) == "COMPLETED", run.output(following)
    assert "NodeList=n2" in slurm.run("scontrol", "show", "job", following).stdout
    run.check_is_over(expected)


def test_a_run_that_has_to_give_way_is_saved_and_comes_back(slurm, expected):
    run = Run(slurm, "preempted", nodes=1, ntasks_per_node=2, exclusive=True, partition="low")
    run.wait_for_steps(3)
    other = slurm.submit("sleep 1", nodes=2, exclusive=True, partition="high", time=20)
    assert slurm.wait(run.job) == "COMPLETED", run.output()
    assert "SIGTERM on rank" in run.output()
    following = run.next_job()
    assert slurm.wait(other) == "COMPLETED"
    assert slurm.wait(following) == "COMPLETED", run.output(following)
    run.check_is_over(expected)
