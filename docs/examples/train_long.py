"""Trains a small GPT on sequences that ranks share: each has a part of the tokens, and attention sees all of them.

mpispeed run -n 4 docs/examples/train_long.py --sequence 4 --ring 2    # 2 x 2 ranks: heads inside, a ring outside
mpispeed run -n 2 docs/examples/train_long.py --steps 60               # goes on with other numbers of ranks
"""

import argparse

from gpt import GPT, Attention, Shape, _rotate
from text import Windows, standard_library
from torch import Tensor, manual_seed

import mpispeed
from mpispeed import sequence


class LongAttention(Attention):
    """Causal self-attention with rotary positions, over all ranks of a sequence."""

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """What each token of this rank gathers, (batch, tokens of this rank, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = sequence.attention(_rotate(q, rotation), _rotate(k, rotation), v)
        return self.out(y.transpose(1, 2).flatten(2))


class LongGPT(GPT):
    """Predicts the next byte; `x` and `y` are this rank's part, cut by the engine. `y` is `x` one byte later."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy of the whole sequence; logits of a quarter of the tokens are there at a time."""
        hidden, rotation = self.embedding(x), self.rotation[:, sequence.positions(x)]
        for block in self.blocks:
            hidden = block(hidden, rotation)
        return sequence.tiled_loss(self.head, self.norm(hidden), y, tiles=4)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for name, default in (("stage", 3), ("sequence", None), ("ring", 1), ("length", 512), ("steps", 30)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--out", default="train_long")
given = parser.parse_args()
config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
config |= {"sequence_parallel_size": given.sequence, "sequence_parallel": {"ring_size": given.ring}}
config |= {"zero_optimization": {"stage": given.stage}}
manual_seed(0)  # the same weights in each start
model = LongGPT(Shape(layers=2, width=64, block=given.length))
for block in model.blocks:
    block.attention.__class__ = LongAttention
data = Windows(standard_library(cap_bytes=1_000_000)[0], given.length)
engine, _, loader, _ = mpispeed.initialize(model=model, training_data=data, config=config)
engine.load_checkpoint(given.out)
batches = iter(mpispeed.RepeatingLoader(loader))
for step in range(engine.global_steps + 1, given.steps + 1):
    engine.backward(loss := engine(*next(batches)))
    engine.step()
    if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}")
engine.save_checkpoint(given.out)
