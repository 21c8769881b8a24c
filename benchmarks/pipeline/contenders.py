"""One training step of every pipeline: ours by schedule, and those of torch.distributed.pipelining on gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

import mpispeed
from mpispeed.pipe import PipelineModule

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

SIZES = {  # blocks, heads, width, vocabulary
    "15m": (8, 6, 384, 512),
    "26m": (8, 8, 512, 512),
}
CHUNKS = 2
"""Virtual stages of each rank where a schedule has several."""

OURS = ("1f1b", "gpipe", "interleaved", "zb-h1")
THEIRS = {
    "torch 1f1b": pipelining.Schedule1F1B,
    "torch gpipe": pipelining.ScheduleGPipe,
    "torch interleaved": pipelining.ScheduleInterleaved1F1B,
    "torch interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    "torch zbv": pipelining.ScheduleZBVZeroBubble,
}
OF_ONE_CHUNK = (pipelining.Schedule1F1B, pipelining.ScheduleGPipe)

Step = Callable[[], "float | None"]
"""Trains on one global batch; gives the mean loss where it is known."""


class Embed(nn.Module):
    """Tokens and places to vectors."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(peers.LENGTH, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: ids [batch, length] to [batch, length, width]."""
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))


class Head(nn.Module):
    """Vectors to scores of all tokens."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: [batch, length, width] to [batch, length, vocabulary]."""
        return self.out(self.norm(x))


def layers_of(size: str) -> list[nn.Module]:
    """The layers of a GPT, with the same weights on every rank and in every call."""
    blocks, heads, width, vocabulary = SIZES[size]
    torch.manual_seed(1)
    return [Embed(width, vocabulary), *(peers.Block(width, heads) for _ in range(blocks)), Head(width, vocabulary)]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def micro_batches(size: str, count: int, samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of inputs and targets, the same on every rank. Shapes: [samples, length] each."""
    ids = peers.token_ids(SIZES[size], count * samples, 0)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids.split(samples)]


def make_ours(size: str, schedule: str, data: list[tuple[torch.Tensor, torch.Tensor]], stages: int) -> Step:
    """An engine. Collective over: all ranks."""
    chunks = CHUNKS if schedule == "interleaved" else 1
    samples = data[0][0].shape[0]
    module = PipelineModule(layers_of(size), stages, loss_fn=loss_of, partition_method="parameters", num_chunks=chunks)
    settings = {
        "train_batch_size": samples * len(data),
        "train_micro_batch_size_per_gpu": samples,
        "optimizer": {"type": "AdamW", "params": peers.ADAM},
        "pipeline": {"schedule": schedule},
    }
    engine, *_ = mpispeed.initialize(model=module, config=settings)
    return lambda: float(engine.train_batch(iter(data)))


def make_theirs(size: str, schedule: str, data: list[tuple[torch.Tensor, torch.Tensor]], rank: int, ranks: int) -> Step:
    """Torch's pipeline with its fastest CPU optimizer; losses are divided on the way, so that gradients need not be."""
    kind = THEIRS[schedule]
    chunks = 1 if kind in OF_ONE_CHUNK else CHUNKS
    total = ranks * chunks
    own = [rank, total - 1 - rank] if kind is pipelining.ScheduleZBVZeroBubble else range(rank, total, ranks)
    borders = PipelineModule(layers_of(size), ranks, partition_method="parameters", num_chunks=chunks).parts
    layers = layers_of(size)
    modules = [nn.Sequential(*layers[borders[place] : borders[place + 1]]) for place in own]
    stages = [
        pipelining.PipelineStage(module, place, total, torch.device("cpu"))
        for module, place in zip(modules, own, strict=True)
    ]
    pipeline: Any = kind(
        stages[0] if chunks == 1 else stages,
        len(data),
        loss_fn=lambda logits, targets: loss_of(logits, targets) / len(data),
        scale_grads=False,
    )
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], fused=True, **peers.ADAM)
    inputs, targets = (torch.cat(column) for column in zip(*data, strict=True))
    args = (inputs,) if 0 in own else ()
    is_last = total - 1 in own

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        ending = {"target": targets, "losses": losses} if is_last else {}
        optimizer.zero_grad(set_to_none=True)
        pipeline.step(*args, return_outputs=False, **ending)
        optimizer.step()
        return float(sum(loss.detach() for loss in losses)) if is_last else None

    return step
