"""Trains a small GPT on windows whose length grows with the steps, on any number of ranks.

mpispeed run -n 2 docs/examples/train_curriculum.py --steps 200
mpispeed run -n 1 docs/examples/train_curriculum.py --steps 400     # goes on from the checkpoint of the former
"""

from __future__ import annotations

import argparse

import torch
from gpt import GPT, Shape
from text import Windows, standard_library

import mpispeed
from mpispeed.curriculum import truncate

SHAPE = Shape(layers=4, heads=4, width=64, block=64)
CONFIG = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
GROWTH = {"curriculum_type": "seqlen", "schedule_type": "fixed_linear"}
TRAINING, HELD_OUT = (Windows(text, SHAPE.block) for text in standard_library(cap_bytes=1_000_000))


class GrowingGPT(GPT):
    """In training, and there alone, the engine says how long windows are."""

    def forward(self, x, y=None, curriculum_seqlen=None):
        """As GPT's, of the first `curriculum_seqlen` bytes. Shapes: x and y [batch, block]."""
        return super().forward(*truncate((x, y), curriculum_seqlen or SHAPE.block))


def main() -> None:
    """Train, save, and say how good the model is on whole windows it has not seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = {"steps": 200, "grow": 150, "shortest": 8, "stage": 2, "out": "train_curriculum"}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    growth = {"enabled": True, "min_difficulty": given.shortest, "max_difficulty": SHAPE.block} | GROWTH
    growth["schedule_config"] = {"total_curriculum_step": given.grow, "difficulty_step": 8}
    config = CONFIG | {"zero_optimization": {"stage": given.stage}, "curriculum_learning": growth}
    engine, _, loader, _ = mpispeed.initialize(model=GrowingGPT(SHAPE), training_data=TRAINING, config=config)
    engine.load_checkpoint(given.out)
    batches = iter(mpispeed.RepeatingLoader(loader))
    for step in range(engine.global_steps + 1, given.steps + 1):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            print(f"step {step} length {engine.curriculum_scheduler_legacy.get_current_difficulty()} loss {loss:.3f}")
    engine.save_checkpoint(given.out)
    x, y = (torch.stack(column) for column in zip(*(HELD_OUT[i] for i in range(0, 480, 4)), strict=True))
    with torch.no_grad():
        loss = engine.eval()(x, y).item()
    if mpispeed.comm.get_rank() == 0:
        print(f"held out: loss {loss:.5f}")


if __name__ == "__main__":
    main()
