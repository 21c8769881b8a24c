"""Jobs whose disk fills up, or that are killed: a clear end, nothing left behind, and the checkpoint is good."""

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.system import CHECKOUT, with_own_mounts

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("offload_worker.py")
LIMIT_SECONDS = 240
RANKS = 2

ON_TMPFS = """
mount -t tmpfs -o size=64m tmpfs "$1" || exit 77
run() { "$PYTHON" -m mpispeed.cli.main run -n "$RANKS" "$WORKER" "$@"; echo "exit code $?"; find "$2" -name '*.swap*'; }
run full "$1" "$2"
rm "$1/filler"
run load "$1" "$2"
"""


def losses_of(text):
    """What the worker trained to."""
    return re.findall(r"losses \[.*\]", text)


@pytest.fixture(scope="module")
def unlimited(job, tmp_path_factory):
    """Losses of a run in which nothing goes wrong; one run serves all tests on so many ranks."""

    @functools.cache
    def train(ranks):
        folder = tmp_path_factory.mktemp("unlimited")
        done = job(ranks, WORKER, "train", folder, folder, limit_seconds=LIMIT_SECONDS)
        assert done.returncode == 0, done.stderr
        assert not list(folder.rglob("*.swap"))
        return losses_of(done.stdout)

    return train


def test_a_disk_that_fills_up_in_a_step(unlimited, tmp_path):
    folder, saves = tmp_path / "disk", tmp_path / "saves"
    folder.mkdir()
    env = {"RANKS": str(RANKS), "PYTHON": sys.executable, "WORKER": str(WORKER), "PYTHONPATH": CHECKOUT}
    argv = [*with_own_mounts(), "sh", "-c", ON_TMPFS, "sh", str(folder), str(saves)]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the job hangs\n{process.communicate()}")
    assert "filled: No space left on device" in out, err
    assert re.findall(r"exit code (\d+)", out) == ["2", "0"], out + err
    assert ".swap\n" not in out
    (told,) = re.findall("mpispeed: error: .*", err)
    for word in ("No space left on device", ".swap", "nvme_path", "resume from the last checkpoint"):
        assert word in told
    assert re.search(rf"ranks? [0-9, ]+ of {RANKS}", told)
    assert "Traceback" not in err
    assert losses_of(out) == unlimited(RANKS)


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_a_job_that_is_killed_leaves_files_to_the_next(ranks, job, unlimited, tmp_path):
    saves = tmp_path / "saves"
    killed = job(ranks, WORKER, "kill", tmp_path, saves, limit_seconds=LIMIT_SECONDS)
    assert killed.returncode != 0
    left = len(list(tmp_path.rglob("*.swap")))
    assert left >= 4, killed.stderr
    done = job(ranks, WORKER, "load", tmp_path, saves, limit_seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert f"found {left}" in done.stdout
    assert "of runs that were killed" in done.stderr
    assert not list(tmp_path.rglob("*.swap"))
    assert losses_of(done.stdout) == unlimited(ranks)


def test_a_file_system_in_memory_trains_with_one_warning(job, unlimited):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        done = job(RANKS, WORKER, "train", folder, folder, limit_seconds=LIMIT_SECONDS)
        assert done.returncode == 0, done.stderr
        assert not list(Path(folder).iterdir())
    assert len(re.findall("WARNING.*host memory, which saves nothing", done.stderr)) == 1, done.stderr
    assert losses_of(done.stdout) == unlimited(RANKS)
