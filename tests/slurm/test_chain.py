"""A training submitted by `mpispeed sbatch` is interrupted, and goes on: requeued, or in a job that follows."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import LATE_SECONDS

WORKER = Path(__file__).parents[1] / "jobs" / "walltime_worker.py"
STEPS = 40
SLOWLY = -1  # seconds of a step in the first job, which has to be at work still when it is interrupted
CHAINS = {"requeue": ("--template", "requeue"), "dependency": ()}


def log_of(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def wait_until(holds, folder, seconds=LATE_SECONDS):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, log_of(folder)
        time.sleep(0.2)


@pytest.fixture(scope="module")
def jobs(slurm_cluster):
    """Jobs that are told to save and stop in the middle of a training: chain -> (number, run folder)."""
    found = {}
    for chain, words in CHAINS.items():
        folder = slurm_cluster.jobs / f"chain-{chain}"
        done = slurm_cluster.run(
            sys.executable, "-m", "mpispeed.cli.main", "sbatch", "--run-dir", folder, "--time", 20, "--cpus-per-task",
            1, "--ntasks-per-node", 2, *words, WORKER, folder, STEPS, SLOWLY,
            json.dumps({"walltime": {"chain": chain}}),
        )  # fmt: skip
        found[chain] = re.search(r"^job (\d+),", done.stdout)[1], folder
    for job, folder in found.values():
        steps = folder / "log.jsonl"
        wait_until(lambda steps=steps: steps.exists() and len(steps.read_text().splitlines()) > 2, folder)
        slurm_cluster.run("scancel", "--batch", "--signal=USR1", job)
    return found


def check_is_whole(folder):
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row[0] for row in rows] == list(range(1, STEPS + 1))


def test_follow_up_job_comes_from_the_copy_of_the_script(slurm, jobs):
    job, folder = jobs["dependency"]
    assert slurm.wait(job) == "COMPLETED", log_of(folder)
    following = re.search(r"job (\d+) was submitted", log_of(folder))
    assert following, log_of(folder)
    about = slurm.run("scontrol", "show", "job", following[1]).stdout
    assert f"Command={folder}/job.sbatch" in about
    assert slurm.wait(following[1]) == "COMPLETED", log_of(folder)
    check_is_whole(folder)


def test_requeued_job_goes_on_by_itself(slurm, jobs):
    job, folder = jobs["requeue"]

    def is_over(state):
        return state == "COMPLETED" and "Restarts=1" in slurm.run("scontrol", "show", "job", job).stdout

    slurm.wait(job, is_over)
    assert f"the run was interrupted: job {job} is requeued" in log_of(folder)
    check_is_whole(folder)
