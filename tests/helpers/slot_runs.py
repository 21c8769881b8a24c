"""Runs of slots with the axes and features that training has: losses as hex, and a digest of all states.

Each of them has dropout, clipping, and as many slots as 1, 2, 3, 4, 6 and 12 data-parallel ranks divide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpispeed
from mpispeed.checkpoints import open_checkpoint
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from tests.helpers.expert_nets import ExpertNet
from tests.helpers.pipes import gpt, gpt_layers
from tests.helpers.sequence_model import LongLM
from tests.zoo.models import built
from tests.zoo.training import config

SLOTS, MICRO, STEPS = 12, 2, 4
WIDTH, CLASSES, LENGTH = 16, 37, 12
SHAPE = gpt.Shape(layers=2, heads=4, width=WIDTH, block=LENGTH, dropout=0.1)


class Stack(nn.Module):
    """Residual layers with dropout, of which some are run anew in backward; returns the mean square."""

    def __init__(self, recompute: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.recompute = recompute or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Shapes: x and y [MICRO, WIDTH]."""
        x = x.to(self.blocks[0][0].weight.dtype)
        for block in self.blocks:
            x = x + self.recompute(block, x)
        return (x.float() - y).square().mean()


def by_torch(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Recomputation by torch."""
    return checkpoint(block, x, use_reentrant=False)


def by_mpispeed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Recomputation by mpispeed."""
    return mpispeed.checkpointing.checkpoint(block, x)


class Dropping(nn.Module):
    """A model of experts with dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.net = nn.Dropout(0.1), ExpertNet(2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        return self.net(self.drop(x), y)


def long_model() -> nn.Module:
    """Cut sequences with dropout."""
    net = LongLM()
    net.embed = nn.Sequential(net.embed, nn.Dropout(0.1))
    return net


class Rows(torch.utils.data.Dataset):
    """Pairs of floats."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        dice = torch.Generator().manual_seed(index)
        return torch.randn(2, *self.shape, generator=dice).unbind(0)


class Tokens(Rows):
    """Tokens, and those that follow them."""

    def __getitem__(self, index: int) -> Any:
        dice = torch.Generator().manual_seed(index)
        found = torch.randint(CLASSES, (self.shape[0] + 1,), generator=dice)
        return found[:-1], found[1:]


class Run(NamedTuple):
    """One way to train.

    Attributes:
        model: made with the same weights on all ranks; gets the number of ranks if it is a pipeline.
        data: samples.
        stage: of zero_optimization.
        dtype: of the weights.
        neighbours: ranks that share a slot, or compute together: what data-parallel ranks are counted without.
        zero: more of zero_optimization.
        more: other sections.
        is_pipe: `model` gets the number of ranks.
    """

    model: Callable[..., nn.Module]
    data: Rows
    stage: int
    dtype: str = "fp32"
    neighbours: int = 1
    zero: Mapping[str, Any] = MappingProxyType({})
    more: Mapping[str, Any] = MappingProxyType({})
    is_pipe: bool = False


def pipe(stages: int, slices: int = 1) -> Callable[[int], nn.Module]:
    """A GPT of so many stages, with tied weights."""

    def made(ranks: int) -> nn.Module:
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=slices, num_dp=ranks // stages // slices)
        return PipelineModule(
            gpt_layers.layers(SHAPE, is_tied=True), topology=topology, loss_fn=gpt_layers.cross_entropy,
            seed_layers=True, base_seed=3,
        )  # fmt: skip

    return made


TEXT, FLAT, EXPERT = Tokens(LENGTH), Rows(WIDTH), Rows(8, 32)
SLICES = {"tensor_parallel": {"autotp_size": 2, "injection_policy_tuple": gpt_layers.SLICES}}
SEQUENCE = {"sequence_parallel_size": 2}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}


def away(device: str, *names: str) -> dict[str, Any]:
    """Sections of states that rest on `device`."""
    return {f"offload_{name}": {"device": device} for name in names}


RUNS = {
    "pipe-0-bf16": Run(pipe(2), TEXT, 0, "bf16", 2, is_pipe=True),
    "pipe-1-fp32": Run(pipe(2), TEXT, 1, "fp32", 2, is_pipe=True),
    "pipe-3-bf16": Run(pipe(2), TEXT, 3, "bf16", 2, is_pipe=True),
    "slices-0-fp32": Run(lambda: gpt.GPT(SHAPE), TEXT, 0, "fp32", 2, more=SLICES),
    "slices-2-bf16": Run(lambda: gpt.GPT(SHAPE), TEXT, 2, "bf16", 2, more=SLICES),
    "slices-3-fp32": Run(lambda: gpt.GPT(SHAPE), TEXT, 3, "fp32", 2, more=SLICES),
    "sequence-1-fp32": Run(long_model, TEXT, 1, "fp32", 2, more=SEQUENCE),
    "sequence-3-bf16": Run(long_model, TEXT, 3, "bf16", 2, more=SEQUENCE),
    "experts-1-fp32": Run(Dropping, EXPERT, 1, "fp32", 2),
    "experts-3-bf16": Run(Dropping, EXPERT, 3, "bf16", 2),
    "fp16-1": Run(Stack, FLAT, 1, more=FP16),
    "fp16-2": Run(Stack, FLAT, 2, more=FP16),
    "cpu-1-fp32": Run(Stack, FLAT, 1, zero=away("cpu", "optimizer")),
    "cpu-2-bf16": Run(Stack, FLAT, 2, "bf16", zero=away("cpu", "optimizer")),
    "nvme-3-bf16": Run(Stack, FLAT, 3, "bf16", zero=away("nvme", "optimizer", "param")),
    "torch-2-fp32": Run(lambda: Stack(by_torch), FLAT, 2),
    "own-3-bf16": Run(lambda: Stack(by_mpispeed), FLAT, 3, "bf16"),
}


def settings(run: Run, folder: Path) -> dict[str, Any]:
    """The config."""
    zero = {name: dict(value, nvme_path=str(folder)) if value.get("device") == "nvme" else value
            for name, value in run.zero.items()}  # fmt: skip
    made = config(run.stage, SLOTS * MICRO, dtype=run.dtype, zero=zero, gradient_clipping=0.05, **run.more)
    made["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-3}}
    return made | {"train_micro_batch_size_per_gpu": MICRO, "reduction": "invariant", "steps_per_print": 10**9}


def trained(name: str, folder: Path, ranks: int, steps: int = STEPS) -> list[Any]:
    """Losses, the last norm, and the digest of all states on rank 0. Collective over: all ranks."""
    run = RUNS[name]
    model = built(lambda: run.model(ranks) if run.is_pipe else run.model())
    engine, _, loader, _ = mpispeed.initialize(model=model, config=settings(run, folder), training_data=run.data)
    feed = iter(mpispeed.RepeatingLoader(loader)) if loader is not None else None
    losses = [float(engine.train_batch(feed)).hex() for _ in range(steps)]
    found = engine.get_global_grad_norm()
    norm = None if found is None else float(found).hex()  # None: the last step was skipped
    engine.save_checkpoint(folder / name, tag=f"n{ranks}")
    engine.destroy()
    return [losses, norm, digest(folder / name, f"n{ranks}")]


def digest(folder: Path, tag: str) -> str:
    """SHA-256 of all elements of weights and states of the optimizer, by name. Local."""
    told = hashlib.sha256()
    with open_checkpoint(folder, tag) as saved:
        for name in sorted(saved.names()):
            for slot in sorted(saved.slots(name)):
                told.update(f"{name}/{slot}".encode())
                told.update(saved.read_whole(name, slot).contiguous().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()
