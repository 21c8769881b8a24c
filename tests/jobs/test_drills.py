"""Real drills: jobs that are broken end, say why once, leave whole checkpoints and go on to the same result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.memory_group import limited_group
from tests.helpers.system import CHECKOUT

WORKER = Path(__file__).with_name("drill_worker.py")
ROOT = Path(__file__).resolve().parents[2]


def test_drills_pass_and_are_reported(tmp_path):
    out = tmp_path / "drills"
    argv = [sys.executable, "-m", "mpispeed.cli.main", "drill", "kill,full_disk,corrupt", "-n", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}
    done = subprocess.run(
        [*argv, "--limit", "300", "--out", out, WORKER, "{dir}", "3"],
        capture_output=True, text=True, env=env, timeout=1000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "drills.json").read_text())
    assert [(row["name"], row["passed"]) for row in report["drills"]] == [
        ("kill", True), ("full_disk", True), ("corrupt", True),
    ]  # fmt: skip
    names = [[check["name"] for check in row["checks"]] for row in report["drills"]]
    ends = ["ends", "exit code", "says it once", "names rank 1", "names the cause"]
    assert names[0] == names[1] == [*ends, "last checkpoint", "goes on", "same result"]
    assert names[2] == ["ends", "exit code", "ends quietly", "verify finds it", "loading refuses it"]
    assert "3 of 3 drills passed" in done.stdout


def test_an_error_of_all_ranks_in_the_backward_pass_is_shown_once_and_logged_by_all(job, tmp_path):
    run, fault = tmp_path / "run", "error:rank=all,place=backward@step=1"
    done = job(2, WORKER, tmp_path / "files", 1, MPISPEED_INJECT=fault, MPISPEED_RUN_DIR=str(run))
    assert done.returncode == 1
    words = f"InjectedError: injected by {fault}"
    assert done.stderr.count(words) == 1
    assert done.stderr.count("uncaught error on rank") == 1
    assert [(run / f"rank-{rank}.log").read_text().count(words) for rank in (0, 1)] == [1, 1]
    merged = [line for line in (run / "merged.log").read_text().splitlines() if words in line]
    assert len(merged) == 1
    assert "[0-1]" in merged[0]


def test_a_rank_that_the_kernel_kills_at_the_memory_limit_of_the_job(tmp_path):
    run = f"{sys.executable} -m mpispeed.cli.main run -n 2 --inject memory:rank=1@step=3 {WORKER} {tmp_path} 1"
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT, "MPISPEED_RUN_DIR": str(tmp_path / "run")}
    with limited_group(1536 << 20) as (folder, reason):
        if folder is None:
            pytest.skip(reason)
        done = subprocess.run(
            ["bash", "-c", f"echo $$ > {folder / 'cgroup.procs'} && exec {run}"],
            capture_output=True, text=True, timeout=400, check=False, env={**os.environ, **env},
        )  # fmt: skip
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("mpispeed: ")]
    assert len(said) == 1, done.stderr
    assert "the job ended because rank 1" in said[0]
    assert "was killed by the kernel at the limit of 1.5 GiB" in said[0]
    assert folder.name in said[0]
    assert "rank 0 ended as a consequence" in done.stderr
