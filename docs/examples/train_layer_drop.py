"""Trains a small GPT with progressive layer drop, or without it (--theta 1), on any number of ranks.

mpispeed run -n 2 docs/examples/train_layer_drop.py --stage 3
mpispeed run -n 1 docs/examples/train_layer_drop.py --steps 200     # goes on from the checkpoint of the former
"""

from __future__ import annotations

import argparse
import time

from gpt import GPT, Block, Shape
from text import Windows, standard_library

import mpispeed
from mpispeed.nn.layer_drop import convert_to_layer_drop

SHAPE = Shape(layers=8, heads=4, width=64, block=64)
CONFIG = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
DATA = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)


def main() -> None:
    """Train and save; a second run goes on from there, at any number of ranks and any stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps at which this run ends")
    parser.add_argument("--of", type=int, default=800, help="steps of the whole training, to which theta is fitted")
    parser.add_argument("--theta", type=float, default=0.5, help="part of the passes in which the last layer runs")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--out", default="train_layer_drop")
    given = parser.parse_args()

    model = convert_to_layer_drop(GPT(SHAPE), Block)  # before initialize; names of weights stay as they are
    drop = {"enabled": True, "theta": given.theta, "gamma": 100 / given.of}
    config = CONFIG | {"zero_optimization": {"stage": given.stage}, "progressive_layer_drop": drop}
    engine, _, loader, _ = mpispeed.initialize(model=model, training_data=DATA, config=config)
    engine.load_checkpoint(given.out)
    batches, began = iter(mpispeed.RepeatingLoader(loader)), time.perf_counter()
    for step in range(engine.global_steps + 1, given.steps + 1):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            seconds, began = time.perf_counter() - began, time.perf_counter()
            print(f"step {step} loss {loss.item():.3f} theta {engine.get_pld_theta():.4f} ({seconds:.1f} s)")
    engine.save_checkpoint(given.out)


if __name__ == "__main__":
    main()
