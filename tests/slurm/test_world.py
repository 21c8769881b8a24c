"""The start of ranks by srun: each MPI forms one world with its plugin; the wrong plugin is named with its cure."""

import shutil
import sys

import pytest

from tests.helpers.slurm_cluster import refuse_or_skip

RANKS = 2
# What a training does first.
JOIN = """\
import torch
from mpispeed.mesh import start
world = start()
one = torch.ones(1)
world.comm.all_reduce(one)
print(f"rank {world.rank} of {world.size} sees {one.item():g}", flush=True)
"""
# Plugin of srun, and what chooses the MPI; the one of the wheel is taken by itself.
STARTS = {"mpich": ("pmi2", {}), "openmpi": ("pmix", {"MPI4PY_MPIABI": "openmpi"}), "wrong": ("none", {})}


@pytest.fixture(scope="module")
def jobs(slurm_cluster):
    """All of them, submitted side by side: name -> number of the job."""
    script = slurm_cluster.jobs / "join.py"
    script.write_text(JOIN)
    return {
        name: slurm_cluster.submit(
            f"srun --mpi={plugin} --kill-on-bad-exit=1 {sys.executable} -m mpi4py {script}",
            nodes=RANKS, ntasks_per_node=1, time=20, env=env,
        )
        for name, (plugin, env) in STARTS.items()
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_srun_forms_one_world_over_two_nodes(slurm, jobs, name):
    if name == "openmpi" and shutil.which("mpirun.openmpi") is None:
        refuse_or_skip(["openmpi-bin", "libpmix-dev"])
    assert slurm.wait(jobs[name]) == "COMPLETED", slurm.output(jobs[name])
    wanted = [f"rank {rank} of {RANKS} sees {RANKS}" for rank in range(RANKS)]
    assert sorted(slurm.output(jobs[name]).splitlines()) == wanted


def test_wrong_plugin_is_answered_with_the_right_one(slurm, jobs):
    assert slurm.wait(jobs["wrong"]) == "FAILED"
    output = slurm.output(jobs["wrong"])
    assert output.count("srun --mpi=pmi2") == 1, output
    assert "started 2 processes" in output
    assert "Traceback" not in output
