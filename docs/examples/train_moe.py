"""Trains a small GPT whose every other perceptron is a layer of experts, on any number of ranks.

mpispeed run -n 4 docs/examples/train_moe.py --ep-size 2 --stage 3
mpispeed run -n 2 docs/examples/train_moe.py --ep-size 1 --steps 100     # goes on from the checkpoint of the former
"""

from __future__ import annotations

import argparse

from gpt import Shape
from gpt_experts import Mixture
from text import Windows, standard_library

import mpispeed

SHAPE = Shape(layers=4, heads=4, width=64, block=64)
CONFIG = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
DATA = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)


def main() -> None:
    """Train and save; a second run goes on from there, with any number of ranks, groups of experts and stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--ep-size", 1), ("--stage", 2), ("--steps", 50)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--out", default="train_moe")
    given = parser.parse_args()
    model = Mixture(SHAPE, given.ep_size)
    config = CONFIG | {"zero_optimization": {"stage": given.stage}}
    engine, _, loader, _ = mpispeed.initialize(model=model, training_data=DATA, config=config)
    engine.load_checkpoint(given.out)
    batches = iter(mpispeed.RepeatingLoader(loader))
    for step in range(engine.global_steps + 1, given.steps + 1):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}")
    engine.save_checkpoint(given.out)


if __name__ == "__main__":
    main()
