"""Checkpointed calls where the parameters they use rest cut over data-parallel ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpispeed.checkpointing import checkpoint
from tests.zoo.cut import WIDTH, check_like_whole, difference
from tests.zoo.models import Residual, Stack

pytestmark = pytest.mark.mpi(min_size=2)


class Checkpointed(Stack):
    """Blocks with dropout; the last layer's weight is read outside of its module."""

    def __init__(self, nested=False):
        super().__init__(4)
        self.nested = nested
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        x = self.first(x)
        if self.nested:
            x = checkpoint(lambda a: checkpoint(self.pair(0), checkpoint(self.blocks[1], a)), x)
            x = checkpoint(lambda a: self.blocks[3](checkpoint(self.pair(2), a)), x)
        else:
            for index in range(4):
                x = checkpoint(self.pair(index), x)
        return checkpoint(lambda a: F.linear(a, self.last.weight), x)

    def pair(self, index):
        return lambda x: self.dropout(self.blocks[index](x))


@pytest.mark.parametrize("nested", [False, True])
def test_blocks(nested):
    check_like_whole(lambda: Checkpointed(nested))


def test_blocks_that_are_the_function():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList(Residual() for _ in range(3))

        def forward(self, x):
            for block in self.body:
                x = checkpoint(block, x)
            return x

    check_like_whole(Model)


def test_parameters_that_are_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x):
            return checkpoint(lambda a, w: torch.tanh(a @ w), self.first(x), self.weight)

    check_like_whole(Model)


def test_a_whole_model():
    def drive(engine, batch, step):
        loss = difference(checkpoint(engine, batch[0]), batch[1])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    check_like_whole(Stack, drive)
