"""Trains a small GPT with fp32 weights and products in 16 bits by torch's autocast, or at a level of Apex.

mpispeed run -n 2 docs/examples/train_autocast.py --mode bfloat16 --stage 3
mpispeed run -n 3 docs/examples/train_autocast.py --mode O2     # a model in fp16 with masters, as Apex makes it
"""

import argparse
from collections import Counter

from gpt import GPT, Shape
from text import Windows, standard_library

import mpispeed

SHAPE = Shape(layers=2, heads=4, width=64, block=64)
CONFIG = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
MODES = {
    "float32": {},
    "bfloat16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "float16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "O1": {"amp": {"enabled": True, "opt_level": "O1"}},
    "O2": {"amp": {"enabled": True, "opt_level": "O2"}},
}


def main() -> None:
    """Train for some steps, and tell what the parameters are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default="bfloat16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=1)
    given = parser.parse_args()
    config = CONFIG | MODES[given.mode] | {"zero_optimization": {"stage": given.stage}}
    data = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)
    engine, _, loader, _ = mpispeed.initialize(model=GPT(SHAPE), training_data=data, config=config)
    batches, is_first = iter(mpispeed.RepeatingLoader(loader)), mpispeed.comm.get_rank() == 0
    for step in range(1, given.steps + 1):
        engine.backward(loss := engine(*next(batches)))
        engine.step()
        if step % 10 == 0 and is_first:
            scale = engine.optimizer.cur_scale
            print(f"step {step} loss {loss.item():.3f} scale {scale:g} skipped {engine.skipped_steps}")
    if is_first:
        print(f"parameters: {dict(Counter(str(param.dtype) for param in engine.module.parameters()))}")


if __name__ == "__main__":
    main()
