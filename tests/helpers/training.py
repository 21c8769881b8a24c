"""A tiny model, its data, and plain single-process training to compare with."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import mpispeed
from mpispeed.zero import guard

VOCABULARY = 61
LENGTH = 9


class Block(nn.Module):
    """Attention-free transformer block: enough to have norms, biases and a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) + x.mean(1, keepdim=True)


class TinyLM(nn.Module):
    """Predicts the next token; returns the mean loss. Embedding and head are tied when asked for."""

    def __init__(self, width: int = 24, depth: int = 2, *, is_tied: bool = True, seed: int = 7) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.scale = nn.Parameter(torch.ones(()))
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1]) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def batches(steps: int, size: int, seed: int = 3) -> list[torch.Tensor]:
    """`steps` global batches of `size` samples with some structure to learn."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY, (steps, size, 1), generator=generator)
    stride = torch.randint(1, 4, (steps, size, 1), generator=generator)
    return list((start + stride * torch.arange(LENGTH)) % VOCABULARY)


def config(stage: int, train_batch: int, accumulation: int, **more: Any) -> dict[str, Any]:
    """A DeepSpeed-style config for the tiny model; at stage 3 small units are cut too."""
    return {
        "train_batch_size": train_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-3}},
        "zero_optimization": zero(stage),
        **more,
    }


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """The section for `stage`; at stage 3 no unit is so small that it stays whole."""
    return {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}) | more


def train_plain(model: nn.Module, data: list[torch.Tensor], *, clip: float = 0.5) -> list[float]:
    """Plain torch on whole batches: AdamW, clipping, the same warm-up. Returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    losses = []
    for step, batch in enumerate(data):
        index = step - 1  # the schedule's index that is in force at this step
        lr = 3e-3 * (0.0 if index < 0 else min(1.0, math.log(index + 1) / math.log(5)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_engine(engine: Any, data: list[torch.Tensor]) -> list[float]:
    """Train on this rank's share of each global batch; returns losses averaged over ranks."""
    rank, size = engine.mesh.index("data"), engine.mesh["data"].size
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for batch in data:
        micro = batch.shape[0] // (size * accumulation)
        total = torch.zeros((), dtype=torch.float64)
        for k in range(accumulation):
            start = (k * size + rank) * micro
            loss = engine(batch[start : start + micro])
            engine.backward(loss)
            engine.step()
            total += loss.detach().double().cpu() / (accumulation * size)
        engine.mesh["data"].all_reduce(total)
        losses.append(float(total))
    return losses


def make_engine(settings: dict[str, Any], **model: Any) -> Any:
    """An engine around a fresh `TinyLM`."""
    return mpispeed.initialize(model=TinyLM(**model), config=settings)[0]


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the model's parameters, gathered where they are cut."""
    return whole_weights(engine.module)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name, gathered where they are cut."""
    keepers = {id(keeper): keeper for keeper in map(guard.keeper_of, model.parameters()) if keeper is not None}
    with ExitStack() as stack:
        for keeper in keepers.values():
            stack.enter_context(keeper.whole(keeper.table.all_units))
        return {name: param.detach().clone() for name, param in model.named_parameters()}
