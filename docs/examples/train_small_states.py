"""Trains a small GPT in bf16 whose masters and optimizer states rest in few bits, on any number of ranks.

mpispeed run -n 2 docs/examples/train_small_states.py --stage 3
mpispeed run -n 1 docs/examples/train_small_states.py --steps 200                   # goes on from that checkpoint
mpispeed run -n 1 docs/examples/train_small_states.py --steps 300 --states fp32     # converts what it loads
"""

from __future__ import annotations

import argparse

from gpt import GPT, Shape
from text import Windows, standard_library

import mpispeed

SHAPE = Shape(layers=4, heads=4, width=128, block=64)
CONFIG = {
    "train_batch_size": 24,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
}


def main() -> None:
    """Train and save; a second run goes on from there, at any number of ranks, stage, and dtypes of states."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps at which this run ends")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--states", choices=["fp32", "bf16", "int8"], default="int8", help="the optimizer's moments")
    parser.add_argument("--masters", choices=["fp32", "nearest", "stochastic", "kahan"], default="kahan")
    parser.add_argument("--out", default="train_small_states")
    given = parser.parse_args()

    types = {"optimizer_states": given.states}
    if given.masters != "fp32":
        types |= {"master_dtype": "bf16", "master_rounding": given.masters}
    config = CONFIG | {"zero_optimization": {"stage": given.stage}, "data_types": types}
    data = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)
    engine, _, loader, _ = mpispeed.initialize(model=GPT(SHAPE), training_data=data, config=config)
    engine.load_checkpoint(given.out)
    batches = iter(mpispeed.RepeatingLoader(loader))
    for step in range(engine.global_steps + 1, given.steps + 1):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    engine.save_checkpoint(given.out)


if __name__ == "__main__":
    main()
