"""Random models: everything that runs is counted once, in one module and as one kind of pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from mpispeed.flops.by_module import ModuleCounter
from mpispeed.nn.activation_checkpointing import checkpoint

WIDTH = 4


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(x @ x.transpose(1, 2), -1) @ x


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(x), self.weight) + x


class Called(nn.Module):
    """A module that calls others in one of several ways."""

    def __init__(self, way: str, *inner: nn.Module) -> None:
        super().__init__()
        self.way, self.inner = way, nn.ModuleList(inner)

    def _all(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        ways: dict[str, Callable[[], Any]] = {
            "plain": lambda: self._all(x),
            "twice": lambda: self._all(self._all(x)),
            "ours": lambda: checkpoint(self._all, x),
            "reentrant": lambda: torch_checkpoint(self._all, x, use_reentrant=True),
            "not reentrant": lambda: torch_checkpoint(self._all, x, use_reentrant=False),
        }
        return ways[self.way]()


LEAVES = st.sampled_from([lambda: nn.Linear(WIDTH, WIDTH), Attention, Convolution, Functions]).map(lambda make: make())
WAYS = st.sampled_from(["plain", "twice", "ours", "reentrant", "not reentrant"])
MODELS = st.recursive(
    LEAVES,
    lambda inner: st.builds(lambda way, models: Called(way, *models), WAYS, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@settings(max_examples=40, deadline=None)
@given(MODELS)
def test_what_torch_counts_is_in_one_place(model: nn.Module) -> None:
    model = Called("plain", nn.Linear(WIDTH, WIDTH), model)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    theirs = FlopCounterMode(display=False)
    with _FlopCounterMode(theirs):  # without its hooks, which fail on transposed inputs of reentrant checkpoints
        loss = model(x).sum()
        forward = theirs.get_total_flops()
        loss.backward()
    counter = ModuleCounter(model)
    counter.start()
    model(x).sum().backward()
    counter.stop()
    total = counter.total()
    assert total.forward == forward
    assert total.forward + total.backward + total.recompute == theirs.get_total_flops()
    assert total.backward == 2 * total.forward  # every product has two gradients here
    assert not counter.unknown
    assert counter.outside == 0
