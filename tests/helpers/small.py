"""A small regression model, its data, and plain torch training to compare engines with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mpispeed
from tests.helpers.training import whole_weights, zero

BATCH = 12  # divides by 3 micro-batches on 1, 2 and 4 ranks, and by 1 micro-batch on 3 ranks
WIDTH = 5


class Net(nn.Module):
    """Two layers with a norm between; takes inputs and targets, returns the mean squared error."""

    def __init__(self, seed: int = 11) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(WIDTH, 19)
            self.norm = nn.LayerNorm(19)
            self.last = nn.Linear(19, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.last(self.norm(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        return nn.functional.mse_loss(out.float(), y)


def samples(steps: int, size: int = BATCH, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` global batches of inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, size, WIDTH, generator=generator)
    y = torch.stack([x.sum(-1).sin(), x[..., 0] * x[..., 1]], -1)
    return list(zip(x, y, strict=True))


def settings(stage: int = 0, **more: Any) -> dict[str, Any]:
    """A config without optimizer for `BATCH` samples per step; at stage 3 small units are cut too."""
    return {"train_batch_size": BATCH, "zero_optimization": zero(stage), **more}


ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True}


def start(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    """An engine of `mpispeed.initialize` around `model`, by default a fresh `Net`."""
    return mpispeed.initialize(model=Net() if model is None else model, config=config, **more)[0]


def own_part(engine: Any, batch: tuple[torch.Tensor, ...], micro: int = 0) -> tuple[torch.Tensor, ...]:
    """This rank's share of micro-batch `micro` of a global batch."""
    rank, size, accumulation = engine.global_rank, engine.world_size, engine.gradient_accumulation_steps()
    count = batch[0].shape[0] // (size * accumulation)
    first = (micro * size + rank) * count
    return tuple(tensor[first : first + count] for tensor in batch)


def train(engine: Any, data: list[tuple[torch.Tensor, ...]], **step: Any) -> list[float]:
    """Run global batches; returns this rank's loss of every step."""
    losses = []
    for batch in data:
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*own_part(engine, batch, micro))
            total += float(engine.backward(loss).detach())
            engine.step(**step)
        losses.append(total)
    return losses


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[torch.Tensor, ...]],
    *,
    clip: float = 0.0,
    after: Callable[[], None] | None = None,
) -> list[float]:
    """Plain torch on whole batches; parameters without a gradient get zeros. Returns the norm of each step."""
    norms = []
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    for batch in data:
        optimizer.zero_grad()
        model(*batch).backward()
        for param in trained:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        optimizer.step()
        if after is not None:
            after()
    return norms


weights = whole_weights


def check_equal(model: nn.Module, reference: nn.Module, *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Fail unless all parameters are close."""
    theirs = weights(reference)
    for name, ours in weights(model).items():
        torch.testing.assert_close(ours, theirs[name], rtol=rtol, atol=atol, msg=lambda text, at=name: f"{at}: {text}")


def check_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Fail unless two results of `weights` are equal to the bit."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
