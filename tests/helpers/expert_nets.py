"""A model with both kinds of layers of experts, in sizes that grouped products take, and data for it."""

import torch
from torch import nn

from mpispeed.moe import MoE
from mpispeed.nn.expert import MLPExperts, RoutedExperts, Router, RouterOptions, SwiGLUExperts

HIDDEN, INNER, EXPERTS, LENGTH = 32, 48, 4, 8


class Perceptron(nn.Module):
    """An expert that returns a tuple, as some do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))), "more"


class ExpertNet(nn.Module):
    """DeepSpeed's layer, then fused experts with and without a gate; returns the mean loss."""

    def __init__(self, ep_size=1, seed=5):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = MoE(HIDDEN, Perceptron(), num_experts=EXPERTS, k=2, drop_tokens=False,
                             top2_2nd_expert_sampling=False)  # fmt: skip
            self.second = self._routed(SwiGLUExperts(HIDDEN, INNER, EXPERTS))
            self.third = self._routed(MLPExperts(HIDDEN, INNER, EXPERTS))
        if ep_size > 1:
            for layer in (self.first, self.first.deepspeed_moe, self.second, self.third):
                layer.ep_size = ep_size

    @staticmethod
    def _routed(experts):
        return RoutedExperts(Router(HIDDEN, EXPERTS, RouterOptions(k=2)), experts)

    def forward(self, x, y):
        x = x.to(self.second.gate.wg.weight.dtype)
        x = x + self.first(x)[0]
        for layer in (self.second, self.third):
            x = x + layer(x)[0]
        return (x.float() - y).square().mean()


def expert_batches(steps, count):
    """Global batches. Shapes: [count, LENGTH, HIDDEN], inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, count, LENGTH, HIDDEN, generator=generator).unbind(0)) for _ in range(steps)]
