"""Weights & Biases and Comet in jobs of SLURM: one that ends by itself, and one that is cancelled."""

import json
import sys
import time
from pathlib import Path

from tests.helpers.services import NOWHERE, comet_points, wandb_points

SCRIPT = Path(__file__).parents[1] / "jobs" / "monitors_worker.py"
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "wandb": {"enabled": True}, "comet": {"enabled": True, "samples_log_interval": 1},
}  # fmt: skip


def steps_written(folder):
    try:
        series = (wandb_points(folder), comet_points(folder / "comet"))
    except (OSError, ValueError, KeyError):  # an archive that is not finished
        return None
    return [sorted({len(pairs) for pairs in found.values()}) for found in series]


def test_points_are_kept_when_a_job_ends_and_when_it_is_cancelled(slurm):
    folders = {way: slurm.jobs / f"monitors-{way}" for way in ("forgotten", "waiting")}
    jobs = {}
    for way, folder in folders.items():
        folder.mkdir()
        quiet = {**NOWHERE, "WANDB_X_DISABLE_STATS": "true", "MPISPEED_MONITOR_SECONDS": "60"}
        quiet |= {"SETTINGS": json.dumps(SETTINGS), "MPISPEED_RUN_DIR": str(folder)}
        words = f"srun --mpi=pmi2 --kill-on-bad-exit=1 {sys.executable} {SCRIPT} {way}"
        jobs[way] = slurm.submit(words, nodes=1, ntasks_per_node=2, time=20, env=quiet)
    assert slurm.wait(jobs["forgotten"]) == "COMPLETED", slurm.output(jobs["forgotten"])
    assert steps_written(folders["forgotten"]) == [[8], [8]]
    end = time.monotonic() + 120
    while not (folders["waiting"] / "trained").exists():
        assert time.monotonic() < end, slurm.output(jobs["waiting"])
        time.sleep(0.2)
    time.sleep(3)  # Weights & Biases' own process, which a signal ends, writes every 2 seconds
    slurm.run("scancel", jobs["waiting"])
    assert slurm.wait(jobs["waiting"]) == "CANCELLED"
    while steps_written(folders["waiting"]) != [[8], [8]]:
        assert time.monotonic() < end, (steps_written(folders["waiting"]), slurm.output(jobs["waiting"]))
        time.sleep(1)
