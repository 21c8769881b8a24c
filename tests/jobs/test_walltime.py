"""A run in pieces has the losses of an unbroken one: ended by a signal, by the end of the job, by a file."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("walltime_worker.py")
LOADER_WORKER = Path(__file__).with_name("walltime_loader_worker.py")
STEPS = 160


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("MPISPEED_WALLTIME", "MPISPEED_RUN_DIR"):
            monkeypatch.delenv(name)


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def state(folder):
    return json.loads((folder / "state.json").read_text())


def test_a_run_in_four_pieces(job, tmp_path):
    straight, pieces = tmp_path / "straight", tmp_path / "pieces"
    straight.mkdir()
    pieces.mkdir()

    def run(folder, seconds, limit_seconds=3600.0, **wishes):
        env = {"MPISPEED_RUN_DIR": str(folder), "MPISPEED_WALLTIME": str(limit_seconds)}
        done = job(2, WORKER, folder, STEPS, seconds, json.dumps(wishes), **env)
        assert done.returncode == 0, done.stderr
        return done.stderr

    begin = time.monotonic()
    run(straight, 0)
    # Of the piece that the end of the job interrupts: long enough to begin, too short for all steps.
    limit = 10 + 2 * (time.monotonic() - begin)
    assert state(straight)["state"] == "finished"

    run(pieces, 0.03, signal=[4, 1, signal.SIGUSR1])
    first = state(pieces)
    assert (first["state"], first["reason"]) == ("interrupted", "SIGUSR1 on rank 1")
    assert 4 <= first["step"] <= 4 + 33

    told = run(pieces, limit / 100, limit)
    second = state(pieces)
    assert (second["state"], second["reason"], second["first_step"]) == ("interrupted", "the job ends", first["step"])
    assert second["step"] > first["step"]
    assert f"resumed from {pieces}/checkpoints/walltime_step{first['step']}" in told
    assert "needed for another step and a save" in told
    step, reason, seconds = rows(pieces / "ends.jsonl")[1]
    assert (step, reason) == (second["step"], "the job ends")
    assert seconds < limit, "saved and marked before the job ended"

    (pieces / "STOP").touch()
    told = run(pieces, 0)
    assert "remove" in told
    assert state(pieces)["state"] == "stopped"
    (pieces / "STOP").unlink()

    run(pieces, 0)
    last = state(pieces)
    assert (last["state"], last["step"], last["first_step"]) == ("finished", STEPS, second["step"])
    assert rows(pieces / "log.jsonl") == rows(straight / "log.jsonl")


def test_a_signal_to_all_processes_of_a_job_spares_loaders_until_the_run_is_saved(job, tmp_path):
    done = job(1, LOADER_WORKER, tmp_path)
    assert done.returncode == 0, done.stderr
    found = state(tmp_path)
    assert (found["state"], found["reason"]) == ("interrupted", "SIGTERM on rank 0")
    assert "killed by signal" not in done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == [
        {"loaders": 2, "alive_after_the_signal": 3, "terminated": -signal.SIGTERM}
    ]


STUCK = """
import ctypes, sys
from mpispeed.walltime import second_sigterm as impatience, requests
impatience.IMPATIENT_SECONDS = float(sys.argv[1])
requests.SignalWatch(['TERM']).install()
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
library.pthread_mutex_init(mutex, None)
library.pthread_mutex_lock(mutex)
print('ready', flush=True)
library.pthread_mutex_lock(mutex)
"""


def test_a_second_sigterm_ends_a_run_that_is_stuck():
    """Stuck where no handler of Python runs: in a call of C that never returns, as a collective would."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "1.5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):  # both within the time that some launchers need to send one twice
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        time.sleep(1.8)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
