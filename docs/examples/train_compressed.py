"""Trains a small GPT so that it stands being made smaller, on any number of ranks, and makes it smaller in the end.

mpispeed run -n 2 docs/examples/train_compressed.py --stage 3 --steps 40
mpispeed run -n 1 docs/examples/train_compressed.py --steps 100     # goes on from the checkpoint of the former
"""

from __future__ import annotations

import argparse

from gpt import GPT, Shape
from text import Windows, standard_library

import mpispeed
from mpispeed.compression import redundancy_clean

SHAPE = Shape(layers=4, heads=4, width=64, block=64)
DATA = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)
CONFIG = {"train_batch_size": 24, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
BITS = {"start_bits": 12, "target_bits": 8, "quantization_period": 5}  # bits fall after 5, 10, 20 and 40 updates
BLOCKS = {"params": BITS, "modules": ["attention", "mlp"]}
ROWS = {"modules": [r"mlp\.0"], "related_modules": [[r"mlp\.2"]]}  # the columns that follow go with them
COMPRESSION = {
    "weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {"blocks": BLOCKS}},
    "row_pruning": {
        "shared_parameters": {"enabled": True, "method": "topk", "schedule_offset": 10},
        "different_groups": {"inner": {"params": {"dense_ratio": 0.5}, **ROWS}},
    },
}


def main() -> None:
    """Train, save, and clean; a second run goes on, at any number of ranks and any stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps at which this run ends")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--out", default="train_compressed")
    given = parser.parse_args()

    config = CONFIG | {"zero_optimization": {"stage": given.stage}, "compression_training": COMPRESSION}
    engine, _, loader, _ = mpispeed.initialize(model=GPT(SHAPE), training_data=DATA, config=config)
    engine.load_checkpoint(given.out)
    batches, is_first = iter(mpispeed.RepeatingLoader(loader)), mpispeed.comm.get_rank() == 0
    for step in range(engine.global_steps + 1, given.steps + 1):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and is_first:
            print(f"step {step} loss {loss.item():.3f} bits {engine.compression.layers['blocks.0.mlp.2'].bits}")
    engine.save_checkpoint(given.out)

    before = sum(tensor.nbytes for tensor in engine.module.parameters())
    model = redundancy_clean(engine, config)  # plain again: fewer inner features, weights as packed codes of 8 bits
    if is_first:
        after = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        print(f"{before} bytes before, {after} after; loss {model(*next(batches)).item():.3f}")


if __name__ == "__main__":
    main()
