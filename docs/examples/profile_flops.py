"""What a model computes: by module, and in one step of a run on all ranks.

python docs/examples/profile_flops.py                    the model alone
mpispeed run -n 2 docs/examples/profile_flops.py train   one step on 2 ranks, with the use of their processors
"""

from __future__ import annotations

import sys

import torch
from gpt import GPT, VOCABULARY, Shape

import mpispeed
from mpispeed.flops import get_model_profile

SHAPE = Shape(layers=2, heads=4, width=64, block=32)


def tokens(batch: int) -> torch.Tensor:
    """Bytes at random, (batch, SHAPE.block)."""
    return torch.randint(VOCABULARY, (batch, SHAPE.block))


def alone() -> None:
    """One forward pass, in evaluation mode."""
    flops, macs, params = get_model_profile(GPT(SHAPE), args=[tokens(8)], top_modules=2)
    print(f"{flops} flops, {macs}, {params} parameters")


def train() -> None:
    """Three steps, of which the last is counted."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "detailed": False, "peak_flops": "measure"},
    }
    engine, *_ = mpispeed.initialize(model=GPT(SHAPE), config=config)
    for _ in range(3):
        x = tokens(8)
        engine.backward(engine(x, x.roll(-1, 1)))
        engine.step()
    engine.destroy()


if __name__ == "__main__":
    train() if "train" in sys.argv else alone()
