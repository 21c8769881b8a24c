"""The GPT of the examples with the same weights wherever it is made, and bytes to train it on."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.helpers.pipes import gpt


class SteadyGPT(gpt.GPT):  # type: ignore[misc,name-defined]
    """A GPT with equal weights on all ranks and in all runs; `recompute` runs each block."""

    def __init__(self, shape: Any, recompute: Any = None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            super().__init__(shape)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        hidden = self.embedding(x)
        for block in self.blocks:
            run = self.recompute or (lambda function, *args: function(*args))
            hidden = run(block, hidden, self.rotation)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def byte_batches(count: int, batch: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches of bytes and the next ones, [batch, length] each."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, 64, (count, batch, length + 1), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in text]
