"""Trains to a step with a run record in FOLDER, saves at step 20, and ends as WAY says: well, killed or failed.

run_record_worker.py WAY FOLDER STEPS; goes on from the checkpoint if there is one.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import mpispeed
from mpispeed.record.reader import open_record

way, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
settings = {
    "train_batch_size": 12, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 1},
    "run_record": {"enabled": True, "path": str(folder / "record"), "rows": 100},
}  # fmt: skip


def written():
    """Steps that the file has."""
    record = open_record(folder / "record" / "run.h5")
    has_steps = any(info.name == "Step/seconds" for info in record.series())
    return len(record.points("Step/seconds").step) if has_steps else 0


engine, *_ = mpispeed.initialize(model=torch.nn.Linear(4, 1), config=settings)
if (folder / "ckpt").exists():
    engine.load_checkpoint(str(folder / "ckpt"))
while engine.global_steps < steps:
    engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).square().mean())
    engine.step()
    if engine.global_steps == 20:
        engine.save_checkpoint(str(folder / "ckpt"))
if way == "killed":
    while engine.global_rank == 0 and written() < steps:
        time.sleep(0.2)
    mpispeed.comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
if way == "failed" and engine.global_rank == 0:
    message = f"planted after {steps} steps"
    raise ArithmeticError(message)
