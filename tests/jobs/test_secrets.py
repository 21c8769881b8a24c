"""A key in the config: in no file of a run, neither plain nor encoded, and nothing that is printed."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpispeed.record.runs import open_run
from mpispeed.record.summary import summary
from tests.helpers.system import CHECKOUT

WORKER = Path(__file__).with_name("secret_worker.py")
KEY = "kY7-distinctive-9Qz-secret"
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "dump_state": True,
    "zero_optimization": {"stage": 1}, "wandb": {"enabled": False, "team": "us"},
    "comet": {"enabled": False, "api_key": KEY},
}  # fmt: skip


def forms():
    """The key as bytes, and in base64 wherever it may stand in a longer text."""
    raw = KEY.encode()
    found = [raw, raw.hex().encode(), KEY.encode("utf-16-le")]
    for before in range(3):
        cut = base64.b64encode(b"x" * before + raw)[4 if before else 0 : -4]
        found += [cut, cut.replace(b"+", b"-").replace(b"/", b"_")]
    return found


def leaks(*places):
    """Where the key stands: names of files, of those in folders too, and numbers of texts."""
    found = []
    for number, place in enumerate(places):
        files = [path for path in place.rglob("*") if path.is_file()] if isinstance(place, Path) else [None]
        for path in files:
            content = place.encode() if path is None else path.read_bytes()
            found += [path or number] if any(form in content for form in forms()) else []
    return found


def test_the_search_finds_what_leaks(tmp_path):
    encoded = base64.urlsafe_b64encode(json.dumps(SETTINGS).encode())
    (tmp_path / "a").write_bytes(b"\0" + encoded)
    assert leaks(tmp_path, KEY, "nothing") == [tmp_path / "a", 1]


@pytest.mark.parametrize("way", ["well", "crash", "hang"])
def test_a_key_of_the_config_is_in_no_file_and_no_line_of_a_run(job, tmp_path, way):
    settings = {**SETTINGS, "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv")}}
    run = tmp_path / "run"
    more = {"MPISPEED_WATCH_SECONDS": "2", "MPISPEED_HANG_TIMEOUT": "4"} if way == "hang" else {}
    done = job(
        2, WORKER, way, tmp_path, "--api_key", KEY, cwd=tmp_path, SETTINGS=json.dumps(settings), COMET_API_KEY=KEY,
        WANDB_API_KEY=KEY, MPISPEED_RUN_DIR=str(run), **more,
    )  # fmt: skip
    assert (done.returncode == 0) == (way == "well"), done.stderr
    assert list((tmp_path / "ckpt").rglob("state.h5")) and list((tmp_path / "csv").rglob("*.csv"))
    assert way != "hang" or (run / "report.json").exists()
    assert b'"--api_key", "(set)"' in (run / "run.h5").read_bytes()
    assert way != "hang" or "ended from outside" in summary(open_run([run]), 0.0)["said"]
    assert "(set)" in done.stderr + done.stdout  # dump_state
    assert not leaks(tmp_path, done.stdout, done.stderr)


def test_commands_that_read_a_config_do_not_show_its_key(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SETTINGS))
    for words in (
        ("config", "check", path, "-n", 2, "--json"), ("config", "explain", path, "-n", 2),
        ("config", "explain", path, "-n", 2, "--json"), ("plan", path, "-n", 2, "--params", 100, "--largest-layer", 10),
    ):  # fmt: skip
        argv = [sys.executable, "-m", "mpispeed.cli.main", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": CHECKOUT}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400, env=environment)
        assert done.returncode in (0, 1), done.stderr
        assert not leaks(done.stdout, done.stderr), words
