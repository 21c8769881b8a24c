"""The cluster of these tests: a real SLURM with the nodes n1 and n2 on this machine, started once per session.

A test takes the fixture `slurm` (tests/helpers/slurm_cluster.py):

    def test_two_ranks(slurm):
        job = slurm.submit(f"srun --mpi=pmi2 {sys.executable} x.py", nodes=2, ntasks_per_node=1, time=20)
        assert slurm.wait(job) == "COMPLETED", slurm.output(job)

and may call `slurm.run("scontrol", "show", "job", job)`, `slurm.drain("n1")`, `slurm.resume("n1")`. Nodes have 8 cores
by SLURM's book, so that jobs can wait side by side: submit several first, then wait. Files that all nodes see go below
`slurm.jobs` or tmp_path. Without the packages the tests are skipped, and fail with CI=true. A requeued job waits
15 s here, not two minutes; a signal asked for by --signal may still come up to a minute early. Jobs of the partition
`low` give way to those of `high`, 200 s after a SIGTERM.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.slurm_cluster import NODES, SlurmCluster, missing_programs, refuse_or_skip


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster, from the first test that asks to the last."""
    if missing := missing_programs():
        refuse_or_skip(missing)
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster with both nodes in service, also after a test that took one away."""
    yield slurm_cluster
    for node in NODES:
        slurm_cluster.resume(node)
