"""The doctor inside a SLURM job: as a step on two nodes, with the wrong plugin, and in the batch script."""

import json
import sys

import pytest

DOCTOR = f"{sys.executable} -m mpispeed.cli.main doctor --json"


@pytest.fixture(scope="module")
def report(slurm_cluster):
    """name -> (findings by name, rank 0's exit code) of one job that asks three times."""
    folder = slurm_cluster.jobs / "doctor"
    folder.mkdir()
    script = (
        f"cd {folder}\nsrun --mpi=pmi2 {DOCTOR} > right.json; echo $? > right.code\n"
        f"srun --mpi=none {DOCTOR} > wrong.json; echo $? > wrong.code\n"
        f"{DOCTOR} > alone.json; echo $? > alone.code\n"
    )
    job = slurm_cluster.submit(script, nodes=2, ntasks_per_node=1, time=9)
    assert slurm_cluster.wait(job) == "COMPLETED", slurm_cluster.output(job)
    output = slurm_cluster.output(job)
    assert "Traceback" not in output
    found = {}
    for name in ("right", "wrong", "alone"):
        answer = json.loads((folder / f"{name}.json").read_text())
        code = int((folder / f"{name}.code").read_text())
        found[name] = {row["name"]: row for row in answer["findings"]}, code
    return found


def test_a_step_on_two_nodes(report, slurm_cluster):
    findings, code = report["right"]
    assert code == 0, findings
    assert findings["world"]["detail"].startswith("2 ranks on ")
    assert findings["PMI"]["detail"].startswith("PMI2 of srun, for MPICH")
    assert findings["thread level"]["verdict"] == "ok"
    assert findings["SLURM"]["detail"].endswith("(step)")
    assert findings["time left"]["verdict"] == "warn"  # nine minutes
    assert findings["time left"]["detail"].endswith("of 00:09:00")
    assert findings["requeue"]["detail"].startswith("allowed")
    assert findings["MpiDefault"]["detail"] == "none; SLURM_MPI_TYPE pmi2"  # the site's default, and the flag
    assert "--kill-on-bad-exit=1" in findings["KillOnBadExit"]["cure"]
    if slurm_cluster.mode == "netns":
        assert "2 nodes (n1, n2)" in findings["world"]["detail"]
        assert "between nodes" in findings["progress"]["detail"]
        assert findings["clocks"]["verdict"] == "ok"
        assert findings["shared by nodes"]["verdict"] == "ok"


def test_the_wrong_plugin_is_named_with_its_cure(report):
    findings, code = report["wrong"]
    assert code == 1
    assert findings["world"]["detail"] == "the launcher started 2 ranks, MPI sees 1"
    assert "srun --mpi=pmi2" in findings["world"]["cure"]


def test_the_batch_script_starts_ranks_by_srun(report):
    findings, code = report["alone"]
    assert code == 0, findings
    assert findings["world of 2"]["verdict"] == "ok"
    assert "`srun mpispeed doctor`" in findings["SLURM"]["cure"]
    assert "`srun --mpi=pmi2`" in findings["MpiDefault"]["cure"]
