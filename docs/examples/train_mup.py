"""Trains a small GPT of any width with the learning rate that fits a narrow one (muP), on any number of ranks.

mpispeed run -n 2 docs/examples/train_mup.py --width 64
mpispeed run -n 2 docs/examples/train_mup.py --width 256 --stage 3     # the same rate fits
"""

from __future__ import annotations

import argparse

import mup
from gpt import GPT, VOCABULARY, Shape
from text import Windows, standard_library

import mpispeed

BASE, HEAD = 32, 16
"""Width of the model whose rates are said, and that of one head of attention, which does not grow."""
BLOCK = 64


def gpt(width: int) -> GPT:
    """A GPT whose last layer is that of muP."""
    model = GPT(Shape(layers=2, heads=width // HEAD, width=width, block=BLOCK))
    model.head = mup.MuReadout(width, VOCABULARY, bias=False)
    return model


def with_base_shapes(width: int) -> GPT:
    """The same with the widths of each parameter beside those of the base model, and weights drawn by them."""
    model = gpt(width)
    mup.set_base_shapes(model, gpt(BASE), delta=gpt(2 * BASE), rescale_params=False)
    for weight in model.parameters():
        if weight.dim() == 2:
            mup.normal_(weight, std=0.1)
    return model


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--width", 128), ("--steps", 40), ("--stage", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-2, help="of the base model")
    given = parser.parse_args()
    optimizer = {"type": "MuAdamW", "params": {"lr": given.lr, "weight_decay": 0.01}}
    config = {"train_batch_size": 24, "optimizer": optimizer, "zero_optimization": {"stage": given.stage}}
    data = Windows(standard_library(cap_bytes=1_000_000)[0], BLOCK)
    model = with_base_shapes(given.width)
    engine, _, loader, _ = mpispeed.initialize(model=model, training_data=data, config=config)
    batches = iter(mpispeed.RepeatingLoader(loader))
    for step in range(1, given.steps + 1):
        engine.backward(loss := engine(*next(batches)))
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f} rates {sorted(set(engine.get_lr()))}")


if __name__ == "__main__":
    main()
