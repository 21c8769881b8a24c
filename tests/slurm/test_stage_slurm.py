"""Environments that are staged on the nodes of a job: read from there alone, removed at every kind of end."""

import json
from pathlib import Path

import pytest

from tests.helpers.environment_copy import FOR_LAUNCHER, make_environment
from tests.helpers.file_trace import FileTrace, running
from tests.helpers.slurm_cluster import NODES

RANK = Path(__file__).with_name("staged_rank.py")
PLACE = "/dev/shm"  # each node of the cluster has its own


@pytest.fixture(scope="module")
def shared(slurm_cluster):
    """The folder of an environment that all nodes see, and its archive: without torch, which ranks here do not need."""
    folder = slurm_cluster.jobs / "shared"
    python = make_environment(folder, folder, FOR_LAUNCHER)
    slurm_cluster.run(python, "-m", "mpispeed", "stage", "pack", PYTHONPATH="")
    return folder


class Job:
    """A job of a rank on each node, from the staged environment, that is let go by a file."""

    def __init__(self, slurm, shared, name):
        self.slurm, self.file = slurm, slurm.jobs / f"{name}-may-end"
        run = f"{shared}/env/bin/python -m mpispeed run --stage-env {RANK} {self.file}"
        script = f"unset PYTHONPATH\nexport MPISPEED_STAGE_DIR={PLACE}\n{run}"
        self.number = slurm.submit(script, nodes=2, ntasks_per_node=1, time=20)

    def wait_for_ranks(self):
        self.slurm.wait(self.number, until=lambda state: state != "PENDING" and (self.places() or state != "RUNNING"))
        assert self.places(), self.slurm.output(self.number)

    def places(self):
        lines = [line for line in self.slurm.output(self.number).splitlines() if line.startswith("[[")]
        return json.loads(lines[0]) if lines else []

    def folders(self):
        """Its folders on the nodes: as many as nodes while it runs."""
        return [path for node in NODES for path in folders_on(self.slurm, node) if f"-{self.number}-" in path.name]

    def wait_until_removed(self):
        self.slurm.until(f"no folder of job {self.number}", lambda: not self.folders())


def folders_on(slurm, node):
    return sorted(Path(f"/proc/{slurm.daemon_pid(node)}/root{PLACE}").glob("mpispeed-env-*"))


def test_ranks_open_nothing_of_the_shared_environment(slurm, shared):
    with FileTrace([slurm.daemon_pid(node) for node in NODES], slurm.folder / "opens") as trace:
        job = Job(slurm, shared, "traced")
        job.wait_for_ranks()
        assert len(job.folders()) == len(NODES)
        job.file.touch()
        assert slurm.wait(job.number) == "COMPLETED", slurm.output(job.number)
    places = job.places()
    staged = places[0][3]
    assert [node for node, *_ in places] == list(NODES)
    assert {path.startswith(f"{staged}/") for _, *paths, _ in places for path in paths} == {True}
    processes = trace.processes()
    opened = [path for rank in running(processes, staged, RANK.name) for path in (*rank.opened, *rank.refused)]
    assert sum(path.startswith(staged) for path in opened) > 2 * 100  # the trace has seen the ranks
    assert [path for path in opened if path.startswith(str(shared))] == []
    unpackers = running(processes, shared, "unpack.py")
    assert sum(path.startswith(staged) for one in unpackers for path in one.opened) > 2 * 1000
    assert [path for one in unpackers for path in one.opened if path.endswith(".tar") and str(shared) in path] == []
    job.wait_until_removed()


def test_folders_go_with_their_job_and_those_of_others_stay(slurm, shared):
    killed, cancelled = Job(slurm, shared, "killed"), Job(slurm, shared, "cancelled")
    for job in (killed, cancelled):
        job.wait_for_ranks()
        assert len(job.folders()) == len(NODES)
    slurm.run("scancel", "--signal=KILL", "--full", killed.number)  # the batch script and its steps
    slurm.wait(killed.number)
    killed.wait_until_removed()
    assert len(cancelled.folders()) == len(NODES)
    slurm.run("scancel", cancelled.number)
    slurm.wait(cancelled.number)
    cancelled.wait_until_removed()


FAILS_ONCE = """
import os, sys
from mpi4py import MPI
starts = int(os.environ["MPISPEED_RESTART_COUNT"])
print("start", starts, os.environ["SLURMD_NODENAME"], sys.prefix, flush=True)
MPI.COMM_WORLD.Barrier()
sys.exit(3 * (starts < 1))
"""


def test_an_elastic_job_starts_again_from_its_copies(slurm, shared):
    """Beside it, a folder that the job's batch script has staged long before is left alone."""
    script = slurm.jobs / "fails_once.py"
    script.write_text(FAILS_ONCE)
    python = f"{shared}/env/bin/python"
    lines = [
        "unset PYTHONPATH",
        f"export MPISPEED_STAGE_DIR={PLACE}",
        f'(eval "$({python} -m mpispeed stage begin)" && echo "$MPISPEED_STAGED") >"$SLURM_SUBMIT_DIR/begun"',
        'srun --overlap --ntasks-per-node=1 touch -d "1 hour ago" "$(cat "$SLURM_SUBMIT_DIR/begun")/lock"',
        f"{python} -m mpispeed run --elastic --restart-pause 0 --stage-env {script}",
        'srun --overlap --ntasks-per-node=1 ls "$(cat "$SLURM_SUBMIT_DIR/begun")/lock"',
    ]
    number = slurm.submit("\n".join(lines), nodes=2, ntasks_per_node=1, time=20)
    assert slurm.wait(number) == "COMPLETED", slurm.output(number)
    said = slurm.output(number).splitlines()
    starts = sorted(line.split()[1:] for line in said if line.startswith("start "))
    assert [start[:2] for start in starts] == [[count, node] for count in ("0", "1") for node in NODES]
    assert len({start[2] for start in starts}) == 1
    assert sum(line.endswith("/lock") for line in said) == len(NODES)
