"""Jobs on 2 ranks with Weights & Biases, Comet and CSV files: the same points in all, however the job ends."""

import csv
import json
import time
from pathlib import Path

import pytest

from tests.helpers.services import NOWHERE, comet_points, thinned, wandb_points

WORKER = Path(__file__).with_name("monitors_worker.py")
KEY = "kY7-distinctive-9Qz-secret"
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "dump_state": True,
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "run"},
    "wandb": {"enabled": True, "project": "mine"},
    "comet": {"enabled": True, "api_key": KEY, "samples_log_interval": 8, "experiment_name": "small"},
}  # fmt: skip


def csv_points(folder):
    """Series, with `_` for `/`, -> its (samples, value) pairs."""
    found = {}
    for path in folder.glob("*.csv"):
        _, *rows = csv.reader(path.read_text().splitlines())
        found[path.stem] = [(int(x), float(value)) for x, value in rows]
    return found


def renamed(points):
    return {name.replace("/", "_"): pairs for name, pairs in points.items()}


@pytest.mark.parametrize("way", ["forgotten", "killed"])
def test_every_monitor_gets_the_same_points(job, tmp_path, way):
    done = job(
        2, WORKER, way, cwd=tmp_path, SETTINGS=json.dumps(SETTINGS), WANDB_API_KEY=KEY.ljust(40, "0"),
        WANDB_X_DISABLE_STATS="true", MPISPEED_MONITOR_SECONDS="60", **NOWHERE,
    )  # fmt: skip
    assert (done.returncode == 0) == (way != "killed"), done.stderr
    end = time.monotonic() + 200
    while not is_complete(tmp_path):
        assert way == "killed" and time.monotonic() < end, done.stderr
        time.sleep(0.2)
    wanted = csv_points(tmp_path / "csv" / "run")
    if way != "killed":  # else the last lines of the files were not written
        assert {len(pairs) for pairs in wanted.values()} == {8}
        assert renamed(wandb_points(tmp_path)) == wanted
        assert renamed(comet_points(tmp_path / "comet")) == {name: thinned(p, 8) for name, p in wanted.items()}
    else:
        found = renamed(wandb_points(tmp_path))
        assert {len(pairs) for pairs in found.values()} == {8}
        assert all(found[name][: len(pairs)] == pairs for name, pairs in wanted.items())
    for service, command in (("wandb", "wandb sync "), ("comet", "comet upload ")):
        assert way == "killed" or done.stderr.count(f"{service}: written to ") == 1
        assert way == "killed" or command in done.stderr
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in text for text in (done.stdout.encode(), done.stderr.encode(), *texts))


def is_complete(folder):
    """True if the archive has been finished, which is the last that happens."""
    archives = list((folder / "comet").glob("*.zip"))
    return bool(archives) and all(path.stat().st_size > 100 for path in archives)
