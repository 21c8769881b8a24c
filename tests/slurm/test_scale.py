"""`mpispeed scale`: runs under mpirun on this machine, jobs under SLURM; both end in a table, a CSV and a picture."""

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import LATE_SECONDS

TRAIN = str(Path(__file__).with_name("train.py"))
SCALE = (sys.executable, "-m", "mpispeed.cli.main", "scale", "--ranks", "1,2", "--skip", "2")
BATCHES = {"strong": [4, 4], "weak": [4, 8]}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "ds.json"
    optimizer = {"type": "SGD", "params": {"lr": 1e-3}}
    path.write_text(json.dumps({"train_batch_size": 4, "optimizer": optimizer, "steps_per_print": 0}))
    return path


def check(folder, mode):
    with (folder / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["ranks"]) for row in rows] == [1, 2]
    assert [int(row["samples_per_step"]) for row in rows] == BATCHES[mode]
    assert [int(row["steps"]) for row in rows] == [6, 6]
    assert float(rows[0]["efficiency"]) == 1
    assert float(rows[1]["efficiency"]) > 0
    assert (folder / "scaling.png").stat().st_size > 1000
    assert "efficiency" in (folder / "scaling.txt").read_text()


def test_runs_on_this_machine(config, tmp_path):
    folder = tmp_path / "study"
    words = ("--mode", "weak", "--folder", folder, TRAIN, "--deepspeed_config", config)
    done = subprocess.run([*SCALE, *map(str, words)], capture_output=True, text=True, check=False, timeout=LATE_SECONDS)
    assert done.returncode == 0, done.stderr
    check(folder, "weak")


def test_run_that_fails_ends_the_study_with_its_last_words(config, tmp_path):
    words = ("--folder", tmp_path / "study", TRAIN, "--deepspeed_config", config, "--no_such_flag")
    done = subprocess.run(
        [*SCALE, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LATE_SECONDS,
        env=dict(os.environ),
    )
    assert done.returncode == 2
    assert "the run on 1 ranks ended with 2" in done.stderr
    assert "unrecognized arguments: --no_such_flag" in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_inside_an_allocation(slurm, config, tmp_path):
    folder = tmp_path / "study"
    words = shlex.join([*SCALE, "--folder", str(folder), TRAIN, "--deepspeed_config", str(config)])
    script = f"unset OMP_NUM_THREADS\n{words}"
    job = slurm.submit(script, nodes=2, ntasks_per_node=1, cpus_per_task=2, time=20)
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    check(folder, "strong")
    assert "efficiency" in slurm.output(job)
    with (folder / "scaling.csv").open() as file:
        assert {row["threads"] for row in csv.DictReader(file)} == {"2"}


def test_jobs_of_a_cluster(slurm, config):
    folder = slurm.jobs / "study"
    words = ("--submit", "--wait", "--time", "5", "--cpus-per-task", "1", "--folder", folder, TRAIN,
             "--deepspeed_config", config)  # fmt: skip
    done = slurm.run(*SCALE, *words, check=False, limit_seconds=LATE_SECONDS)
    assert done.returncode == 0, done.stderr + "".join(path.read_text() for path in folder.rglob("*.log"))
    assert "2 jobs: " in done.stdout
    check(folder, "strong")
    nodes = {path.parent.name: "--nodes=2" in path.read_text() for path in folder.glob("ranks-*/job.sbatch")}
    assert nodes == {"ranks-1-run-0": False, "ranks-2-run-0": True}
    again = slurm.run(sys.executable, "-m", "mpispeed.cli.main", "scale", "--collect", folder)
    assert "efficiency" in again.stdout
