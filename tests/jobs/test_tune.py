"""The example GPT is tuned: a few real trials in one job, files, and a run with the best settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.system import CHECKOUT

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_gpt.py"
SMALL = ("--layers", "1", "--width", "32", "--heads", "2", "--block", "16", "--cap_bytes", "100000", "--sample", "0")
LIMIT_SECONDS = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tune")
    settings = json.loads((EXAMPLE.with_name("tune_config.json")).read_text())
    settings["csv_monitor"] = {"enabled": True, "output_path": str(place / "csv")}
    settings["zero_optimization"]["stage"] = [0, 3]
    settings["autotuning"] |= {
        "tuner_num_trials": 3, "start_profile_step": 2, "end_profile_step": 3, "trial_timeout": 400,
        "metric_path": str(place / "metric.json"),
    }  # fmt: skip
    (place / "ds.json").write_text(json.dumps(settings))
    return place


@pytest.fixture(scope="module")
def tuned(folder):
    """`mpispeed run --autotuning run`: a search, and a run of 2 steps with what it found."""
    words = ["run", "-n", "2", "--autotuning", "run", EXAMPLE, "--deepspeed_config", "ds.json", *SMALL, "--steps", "4"]
    return mpispeed(folder, *words, "--out", "out")


def mpispeed(folder, *words):
    argv = [sys.executable, "-m", "mpispeed.cli.main", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}
    return subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def test_a_search_measures_and_the_run_uses_what_it_found(tuned, folder):
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    rows = json.loads((folder / "autotuning_results" / "trials.json").read_text())
    good = [row for row in rows if row["metric"]]
    assert len(good) == 3
    assert all(row["seconds"] > 0 and row["metrics"]["fwd"] > 0 for row in good)
    assert "z0_gas12_tmbspg1" in {row["name"] for row in good}
    assert {row["train_batch"] for row in rows} == {24}
    assert all(row["sent_bytes"] == row["metrics"]["sent_bytes"] for row in good), (
        "what is sent is predicted to the byte"
    )
    assert all(row["predicted_seconds"] > 0 for row in good[1:])
    best = max(good, key=lambda row: row["metric"])
    found = json.loads((folder / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert found["zero_optimization"]["stage"] == best["stage"]
    assert found["train_micro_batch_size_per_gpu"] == best["micro_batch"]
    assert found["csv_monitor"]["enabled"], "the run has its monitors, the trials had none"
    assert json.loads((folder / "metric.json").read_text())["throughput"] == best["metric"]
    assert (folder / "out" / "loss.csv").is_file()
    steps = [path for path in (folder / "csv").rglob("*.csv") if "lr" in path.name.lower()]
    assert steps
    assert len(steps[0].read_text().splitlines()) <= 1 + 4


def test_a_table_and_the_command_are_printed(tuned, folder):
    assert "| tuning_space" in tuned.stdout
    assert "best: z" in tuned.stdout
    command = (folder / "autotuning_results" / "cmd_optimal.txt").read_text()
    assert command.startswith("mpispeed run -n 2 ")
    assert "ds_config_optimal.json" in command
