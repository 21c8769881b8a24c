"""Progressive layer drop in the GPT of the examples: models, settings, and plain training to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from mpispeed.base.passes import Pass, Passes
from mpispeed.nn.layer_drop import ProgressiveLayerDrop, convert_to_layer_drop
from mpispeed.nn.layer_drop.decisions import Depth, LayerDrop
from tests.helpers.pipes import gpt
from tests.helpers.steady_gpt import SteadyGPT, byte_batches
from tests.zoo.training import ADAM, config

SHAPE = gpt.Shape(layers=4, heads=2, width=16, block=8)
BATCH, THETA, GAMMA, SEED = 24, 0.3, 0.7, 5
DROPS = {"progressive_layer_drop": {"enabled": True, "theta": THETA, "gamma": GAMMA, "seed": SEED}}


def model(recompute: Any = None) -> SteadyGPT:
    """Its blocks can be left out."""
    made = SteadyGPT(SHAPE, recompute)
    convert_to_layer_drop(made, gpt.Block)
    return made


def batches(count: int, batch: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Bytes and the next ones."""
    return byte_batches(count, batch, SHAPE.block)


def settings(stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """Settings of an engine that leaves layers out."""
    return config(stage, BATCH, accumulation, **{**ADAM, **DROPS, **more})


def kept(step: int, micro: int, layers: int = SHAPE.layers) -> list[float]:
    """The probability of each layer that runs in a pass; 0 for those left out."""
    schedule = ProgressiveLayerDrop(THETA, GAMMA)
    if step:
        schedule.update_state(step - 1)
    drop = LayerDrop(schedule, Passes(), SEED)
    depths = [Depth(number, number + 1, layers) for number in range(layers)]
    return [drop.probability(depth) * drop.is_kept(depth, Pass(step, micro)) for depth in depths]


def train_plain(
    data: Sequence[tuple[torch.Tensor, torch.Tensor]], accumulation: int = 1, start: int = 0, clip: float = 0.0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of plain torch on whole batches."""
    plain = SteadyGPT(SHAPE)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    losses = []
    for step, (x, y) in enumerate(data, start):
        total = 0.0
        for micro, (xs, ys) in enumerate(zip(x.chunk(accumulation), y.chunk(accumulation), strict=True)):
            hidden = plain.embedding(xs)
            for block, probability in zip(plain.blocks, kept(step, micro), strict=True):
                if probability:
                    hidden = hidden + (block(hidden, plain.rotation) - hidden) / probability
            loss = F.cross_entropy(plain.head(plain.norm(hidden)).flatten(0, 1), ys.flatten()) / accumulation
            loss.backward()
            total += loss.item()
        for param in plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: param.detach() for name, param in plain.named_parameters()}
