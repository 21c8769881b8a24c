"""The small GPT with layers of experts in place of every other perceptron."""

from __future__ import annotations

from gpt import GPT, Shape, initialise
from torch import Tensor, nn

from mpispeed.moe import MoE


class Experts(nn.Module):
    """Eight experts half as wide as the perceptron they replace, two for a token; keeps the loss that balances them."""

    def __init__(self, width: int, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        options = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(width, expert, num_experts=8, ep_size=ep_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of the layer."""
        output, self.loss, _ = self.moe(x)
        return 2 * output  # a weighted mean of two halves, where the perceptron is their sum


class Mixture(GPT):
    """The GPT with experts. In training its loss has 0.01 times those that balance experts in it."""

    def __init__(self, shape: Shape, ep_size: int = 1) -> None:
        super().__init__(shape)
        for block in self.blocks[1::2]:
            block.mlp = Experts(shape.width, ep_size)
        initialise(self, shape)
        for name, weight in self.named_parameters():
            if ".deepspeed_experts." in name and name.endswith(".2.weight"):
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5)  # as in every perceptron

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """As the GPT's."""
        found = super().forward(x, y)
        if y is None or not self.training:
            return found
        return found + 0.01 * sum(block.mlp.loss for block in self.blocks[1::2])
