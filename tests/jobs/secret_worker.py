"""Trains two steps with a key in the config, saves and writes what is asked for; then ends as WAY says.

secret_worker.py WAY FOLDER, WAY one of well, crash, hang; the config is in the variable SETTINGS.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import mpispeed

way, folder = sys.argv[1], Path(sys.argv[2])
settings = json.loads(os.environ["SETTINGS"])
engine, *_ = mpispeed.initialize(model=torch.nn.Linear(4, 1), config=settings)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
engine.save_checkpoint(str(folder / "ckpt"))
if engine.global_rank == 1:
    if way == "crash":
        message = f"a crash, with {engine.plan.config!r} and {settings['comet'].keys()}"
        raise RuntimeError(message)
    if way == "hang":
        time.sleep(100)
mpispeed.comm.barrier()
