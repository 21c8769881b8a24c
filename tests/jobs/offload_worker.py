"""Trains with everything in swap files, and lets something go wrong in the first step."""

import os
import signal
import sys
from pathlib import Path

import torch

import mpispeed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged

BATCH = 12
WIDTH = 96


def settings(folder: Path) -> dict:
    """Nothing is reserved, so that a full disk is found in the middle."""
    disk = {"device": "nvme", "nvme_path": str(folder)}
    sections = {"offload_param": {**disk, "max_in_cpu": 0}, "offload_optimizer": {**disk, "fast_init": True}}
    return config(3, BATCH, 1, zero=sections, **WARM)


def say(text: str) -> None:
    """At once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def fill(folder: Path) -> None:
    """Take the space that is left."""
    block = bytes(1 << 16)
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(block)
        except OSError as error:
            say(f"filled: {error.strerror}")


def main(how: str, folder: Path, saves: Path) -> None:
    """`how`: train, full, kill, load."""
    world = mpispeed.init_distributed()
    if world.rank == 0:
        say(f"found {len(list(folder.rglob('*.swap')))}")
    world.comm.barrier()
    engine = mpispeed.initialize(model=TinyLM(WIDTH, 3), config=settings(folder))[0]
    data = batches(3, BATCH)
    if how == "load":
        path, _ = engine.load_checkpoint(str(saves))
        assert path is not None
    if how in ("full", "kill"):
        engine.save_checkpoint(str(saves))
        break_off(engine, how, folder, data[0])
    losses = train_averaged(engine, data)
    if world.rank == 0:
        say(f"losses {[round(loss, 12) for loss in losses]}")
    engine.destroy()


def break_off(engine: mpispeed.Engine, how: str, folder: Path, batch: torch.Tensor) -> None:
    """In the middle of the first step, when no optimizer state has been written yet."""
    comm = engine.mesh["data"]
    engine.backward(engine(batch[comm.rank :: comm.size]))
    if how == "full" and comm.rank == 0:
        fill(folder)
    if how == "kill" and comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    engine.step()


torch.manual_seed(0)
main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
