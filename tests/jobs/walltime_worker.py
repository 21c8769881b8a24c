"""A run that is made of several jobs: trains to a step, writes down losses, goes on by itself.

    walltime_worker.py FOLDER STEPS SECONDS WISHES

SECONDS is what a step takes besides its work; with a minus, in the first job only. WISHES is JSON: "walltime" is a
section of the config; "signal": [step, rank, number] makes a rank signal itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mpispeed
from mpispeed.walltime.job_end import process_age_seconds
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config

BATCH = 12


class Numbered(torch.utils.data.Dataset):
    """Samples that carry their own index."""

    def __init__(self) -> None:
        self.tokens = batches(1, 60)[0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.tokens[index]


class Noisy(TinyLM):
    """Draws random numbers, whose generator has to be in the checkpoint."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + 0.1 * torch.rand(()))


def write(file: Path, row: list[Any]) -> None:
    """Append a row."""
    with file.open("a") as log:
        log.write(json.dumps(row) + "\n")


def main(folder: Path, steps: int, seconds: float, asked: dict[str, Any]) -> None:
    """Train until the step `steps` is done."""
    walltime = {"save_dir": str(folder / "checkpoints"), "margin_seconds": 0.2, **asked.get("walltime", {})}
    settings = config(1, BATCH, 1, **WARM, walltime=walltime)
    engine, _, loader, _ = mpispeed.initialize(model=Noisy(), config=settings, training_data=Numbered())
    rank = engine.mesh.rank
    if engine.resumed_from is None:
        torch.manual_seed(5 + rank)
    stream = iter(mpispeed.RepeatingLoader(loader))
    comm = engine.mesh["data"]
    while engine.global_steps < steps:
        indices, tokens = next(stream)
        loss = engine(tokens)
        engine.backward(loss)
        if seconds > 0 or engine.resumed_from is None:
            time.sleep(abs(seconds))
        total = loss.detach().double() / comm.size
        comm.all_reduce(total)
        order = [index for part in comm.gather_objects(indices.tolist()) for index in part]
        if rank == 0:
            write(folder / "log.jsonl", [engine.global_steps + 1, float(total), order])
        if asked.get("signal", [])[:2] == [engine.global_steps + 1, rank]:
            os.kill(os.getpid(), asked["signal"][2])
        try:
            engine.step()
        except mpispeed.RunEnded as ended:
            if rank == 0:
                write(folder / "ends.jsonl", [ended.step, ended.reason, process_age_seconds()])
            raise
        if engine.must_stop:
            break
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))
