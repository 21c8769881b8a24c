"""Trains with the monitors of the config in SETTINGS and ends as WAY says.

monitors_worker.py WAY, WAY one of forgotten (the engine is not destroyed), killed (rank 0 by a signal), waiting.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import mpispeed

way = sys.argv[1]
torch.manual_seed(0)
engine, *_ = mpispeed.initialize(model=torch.nn.Linear(4, 1), config=json.loads(os.environ["SETTINGS"]))
for step in range(8):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.monitor.write_events([("own/value", 0.1 * step, 4 * step)])
config = engine.monitor_config
assert engine.monitor.enabled and config.wandb.enabled and config.comet.enabled
assert "distinctive" not in repr(config)
mpispeed.comm.barrier()
if way == "killed" and engine.global_rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if way == "waiting":
    Path(os.environ["MPISPEED_RUN_DIR"], "trained").touch()
    time.sleep(600)
