"""Seconds of modules, by a clock that only they turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpispeed.flops import by_module
from mpispeed.flops.by_module import ModuleCounter

CLOCK = [0.0]


class _Turns(torch.autograd.Function):
    """Turns the clock of a test on, twice as far in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        CLOCK[0] += seconds
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        found = grad * 1
        CLOCK[0] += 2 * ctx.seconds
        return found, None


class Slow(nn.Module):
    """Takes so many seconds of that clock, before what is in it runs."""

    def __init__(self, seconds: float, *inner: nn.Module) -> None:
        super().__init__()
        self.seconds, self.inner = seconds, nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(_Turns.apply(x, self.seconds))
        return found


def test_seconds_are_those_of_the_module_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_module, "time", SimpleNamespace(perf_counter=lambda: CLOCK[0]))
    model = Slow(1.0, Slow(2.0), Slow(4.0, Slow(8.0)))
    counter = ModuleCounter(model)
    counter.start()
    model(torch.ones(3, 8, requires_grad=True)).sum().backward()
    counter.stop()
    for path, own, whole in (("", 1, 15), ("inner.0", 2, 2), ("inner.1", 4, 12), ("inner.1.inner.0", 8, 8)):
        assert (counter.own[path].seconds, counter.own[path].backward_seconds) == (own, 2 * own)
        assert (counter.total(path).seconds, counter.total(path).backward_seconds) == (whole, 2 * whole)
