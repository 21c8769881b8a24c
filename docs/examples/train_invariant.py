"""Trains a small GPT so that its losses and weights have the same bits at any number of ranks that divides 12.

mpispeed run -n 2 docs/examples/train_invariant.py --stage 3 --out two
mpispeed run -n 3 docs/examples/train_invariant.py --out three
mpispeed ckpt diff --bits two three
mpispeed run -n 1 docs/examples/train_invariant.py --steps 40 --out two     # goes on, with the same bits as three would
"""

from __future__ import annotations

import argparse

import torch
from gpt import GPT, Shape
from text import Windows, standard_library

import mpispeed

SHAPE = Shape(layers=2, heads=4, width=64, block=64, dropout=0.1)
CONFIG = {
    # 12 slots: each is one micro-batch with samples and seeds of its own, whichever rank computes it.
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "reduction": "invariant",
    "reproducibility": {"threads": 1},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}


def main() -> None:
    """Train and save; a second run goes on from there, at any number of ranks and any stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps at which this run ends")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--out", default="train_invariant")
    given = parser.parse_args()

    torch.manual_seed(1)  # the same initial weights on every rank
    model, data = GPT(SHAPE), Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)
    config = CONFIG | {"zero_optimization": {"stage": given.stage}}
    engine, _, loader, _ = mpispeed.initialize(model=model, training_data=data, config=config)
    engine.load_checkpoint(given.out)
    batches = iter(mpispeed.RepeatingLoader(loader))
    while engine.global_steps < given.steps:
        loss = engine.train_batch(batches)  # of all slots, the same on all ranks
        if mpispeed.comm.get_rank() == 0 and engine.global_steps % 5 == 0:
            print(f"step {engine.global_steps} loss {loss.hex()} = {loss:.4f}")
    engine.save_checkpoint(given.out)


if __name__ == "__main__":
    main()
