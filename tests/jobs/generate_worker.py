"""A job of batch generation whose ranks are slow or busy on purpose.

    generate_worker.py SETTINGS

SETTINGS is JSON: model, prompts, out; nap: seconds of each pass through the model; python, torch: seconds that rank 0
is held there in its first batches; signal: [passes, rank, number], a signal that a rank sends to itself; naps only in
the first of several jobs of SLURM.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from mpispeed.generation.job import Settings, _open, run
from mpispeed.generation.stopping import Plan
from mpispeed.mesh.world import current

wishes = json.loads(sys.argv[1])


def hold_in_python(seconds):
    """A loop that never gives the interpreter away by itself."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def hold_in_torch(seconds):
    """One call of torch that takes about so long."""
    x = torch.rand(600, 600)
    began = time.perf_counter()
    torch.linalg.eigvals(x)
    once = time.perf_counter() - began
    size = int(600 * (seconds / once) ** (1 / 3))
    began = time.perf_counter()
    torch.linalg.eigvals(torch.rand(size, size))
    sys.stdout.write(f"held in torch for {time.perf_counter() - began:.1f} s\n")


class Slow:
    def __init__(self):
        self.passes = 0
        self.holds = [(hold_in_python, wishes.get("python", 0)), (hold_in_torch, wishes.get("torch", 0))]

    def __call__(self, *_):
        rank = current().rank
        self.passes += 1
        time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") else wishes.get("nap", 0))
        if rank == 0 and self.passes in (3, 4):
            hold, seconds = self.holds[self.passes - 3]
            if seconds:
                hold(seconds)
        passes, victim, number = wishes.get("signal", (0, 0, 0))
        if (self.passes, rank) == (passes, victim):
            os.kill(os.getpid(), number)


def open_slowly(described, settings):
    opened = _open(described, settings)
    opened.engine.module.register_forward_pre_hook(Slow())
    return opened


settings = Settings(
    Path(wishes["model"]), Path(wishes["prompts"]), (Path(wishes["out"]),), batch_size=wishes.get("batch_size", 4),
    tensor=wishes.get("tensor", 1),
)  # fmt: skip
plan = Plan(wishes.get("chain", "dependency"), wishes.get("margin", 30), interval_seconds=0.5)
settings = replace(settings, plan=plan)
outcome = run(settings, open_with=open_slowly)
if current().rank == 0:
    told = {"finished": outcome.is_finished, "waited": outcome.longest_wait_seconds}
    sys.stdout.write(json.dumps(told) + "\n")
