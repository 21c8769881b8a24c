"""Hugging Face's Trainer and Lightning's, started by srun on two nodes: losses are those of `mpispeed run`."""

import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("clients_script.py")
# Two ranks, so that sums have one order only; what is left is the libraries' rounding of logged numbers.
BOUND = 1e-6


def test_trainers_run_on_two_nodes_by_srun_as_by_mpirun(slurm):
    here, there = slurm.jobs / "clients-run", slurm.jobs / "clients-srun"
    for folder in (here, there):
        folder.mkdir()
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    words = f"--mpi=pmi2 --kill-on-bad-exit=1 {sys.executable} {SCRIPT} {there}"
    job = slurm.submit(f"srun {words}", nodes=2, ntasks_per_node=1, time=20, env=quiet)
    slurm.run(sys.executable, "-m", "mpispeed.cli.main", "run", "-n", 2, SCRIPT, here, **quiet)
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    ours, expected = (json.loads((folder / "found.json").read_text()) for folder in (there, here))
    if slurm.mode == "netns":
        assert ours["hosts"] == ["n1", "n2"]
    for name in ("trainer", "lightning"):
        assert ours[name]["ranks"] == expected[name]["ranks"] == 2
        assert ours[name]["losses"] == pytest.approx(expected[name]["losses"], rel=BOUND)
        assert ours[name]["losses"][-1] != ours[name]["losses"][0]
    assert ours["trainer"]["evaluated"] == pytest.approx(expected["trainer"]["evaluated"], rel=BOUND)
    assert ours["lightning"]["val"] == pytest.approx(expected["lightning"]["val"], rel=BOUND)
