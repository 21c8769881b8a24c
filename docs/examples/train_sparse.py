"""Trains a small GPT whose attention computes a few blocks of the matrix only, on 1, 2, 3, 4, 6 or 12 ranks.

mpispeed run -n 2 docs/examples/train_sparse.py --stage 3
mpispeed run -n 2 docs/examples/train_sparse.py --mode dense     # all blocks, to compare with
"""

import argparse
import time

from gpt import GPT, Attention, Shape, _rotate, initialise
from text import Windows, standard_library
from torch import Tensor

import mpispeed
from mpispeed.nn.sparse import SparseSelfAttention

SHAPE = Shape(layers=2, heads=4, width=64, block=512)
CONFIG = {"train_batch_size": 12, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
SPARSE = {"block": 32, "attention": "unidirectional", "num_local_blocks": 4, "num_sliding_window_blocks": 5}
DATA = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)


class SparseAttention(Attention):
    """The attention of the GPT, within blocks; which ones, the section of the config says."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.sparse = SparseSelfAttention(max_seq_length=shape.block)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = self.sparse(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="bslongformer", help="dense, fixed, variable, bigbird or bslongformer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=1)
    given = parser.parse_args()
    model = GPT(SHAPE)
    for block in model.blocks:
        block.attention = SparseAttention(SHAPE)
    initialise(model, SHAPE)
    config = CONFIG | {"zero_optimization": {"stage": given.stage}, "sparse_attention": SPARSE | {"mode": given.mode}}
    engine, _, loader, _ = mpispeed.initialize(model=model, training_data=DATA, config=config)
    batches, began = iter(mpispeed.RepeatingLoader(loader)), time.perf_counter()
    for step in range(1, given.steps + 1):
        engine.backward(loss := engine(*next(batches)))
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f} ({(time.perf_counter() - began) / step:.3f} s per step)")


if __name__ == "__main__":
    main()
