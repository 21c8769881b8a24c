"""What tests of pipeline modules share: small layers, and modules on simulated ranks."""

import types

import torch
from torch import nn

from mpispeed.mesh import sim
from mpispeed.pipe import PipeDataParallelTopology, PipelineModule, PipelineParallelGrid


class Block(nn.Module):
    """A linear layer whose weights are a function of its number, not of the generator that all threads share."""

    def __init__(self, number, width=4):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator))
        self.bias = nn.Parameter(torch.randn(width, generator=generator))

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.bias)


class Table(nn.Module):
    """An embedding that is tied to a head."""

    def __init__(self, number=0, rows=8, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width, generator=torch.Generator().manual_seed(number)))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return self.weight[tokens] * self.scale


def as_head(table, x):
    """Scores of all rows."""
    return x @ table.weight.t()


def staged(layers, use, stages=2, copies=1, **settings):
    """`use(module)` on each of stages * copies simulated ranks, in rank order."""

    def fn(world):
        grid = PipelineParallelGrid(PipeDataParallelTopology(stages, copies), world)
        module = PipelineModule(layers() if isinstance(layers, types.FunctionType) else layers, grid=grid, **settings)
        result = use(module)
        grid.close()
        return result

    return sim.run(stages * copies, fn)


def names(module):
    """Names of this rank's parameters, sorted."""
    return sorted(name for name, _ in module.named_parameters())
