"""A run whose loaders, and another child, get the signals of the whole job: as from `scancel` or a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

import mpispeed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config


def children() -> list[int]:
    """Process ids of this process's children."""
    own = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


def main(folder: str) -> None:
    """Train until a signal ends the run."""
    context = multiprocessing.get_context("fork")
    settings = config(1, 4, 1, **WARM, walltime={"save_dir": folder, "margin_seconds": 0})
    engine = mpispeed.initialize(model=TinyLM(), config=settings)[0]
    before = set(children())
    loader = torch.utils.data.DataLoader(
        batches(1, 4000)[0], batch_size=4, num_workers=2, multiprocessing_context=context, persistent_workers=True
    )
    sleeper = context.Process(target=time.sleep, args=(600,), daemon=True)
    sleeper.start()
    for step, tokens in enumerate(loader):
        if step == 3:
            # Loaders first: they would be gone before this process knows of anything.
            loaders = [pid for pid in children() if pid not in before and pid != sleeper.pid]
            for pid in (*loaders, sleeper.pid):
                os.kill(pid, signal.SIGUSR1)
            for pid in loaders:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.5)
            alive = [pid for pid in (*loaders, sleeper.pid) if " Z " not in Path(f"/proc/{pid}/stat").read_text()]
            sleeper.terminate()  # as pools of processes do, which wait for it
            sleeper.join(30)
            told = {"loaders": len(loaders), "alive_after_the_signal": len(alive), "terminated": sleeper.exitcode}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        engine.backward(engine(tokens))
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
