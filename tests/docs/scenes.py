"""Scenes of pages: what the names in their blocks are, and which files lie in their folder.

A page names its scenes in a comment at its top, `<!-- scene: model -->`, and others from where they begin. Each scene
is a function that gets the page's namespace, adds to it, and may write files; the folder is the current one. Every page
has `torch`, `nn`, `os` and `mpispeed`. Models are of a size that computes in milliseconds.

Modules `scenes_*.py` here have more of them. On several ranks all of them call a scene, in one folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import mpispeed
from tests.helpers.token_stores import make_store

ROOT = Path(__file__).parents[2]
Names = dict[str, Any]
SCENES: dict[str, Callable[[Names], None]] = {}

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}


def scene(function: Callable[[Names], None]) -> Callable[[Names], None]:
    """Make a scene of a function, under its name."""
    SCENES[function.__name__] = function
    return function


def plain_names() -> Names:
    """What every page has."""
    torch.manual_seed(0)
    return {"__name__": "__main__", "torch": torch, "nn": nn, "os": os, "mpispeed": mpispeed}


def write_once(name: str, text: str) -> None:
    """Write a file of the page's folder on the first rank; others see it after the next collective call."""
    if mpispeed.comm.is_initialized() and mpispeed.comm.get_rank() != 0:
        return
    Path(name).write_text(text)


class Net(nn.Module):
    """A perceptron of two blocks that returns a loss for inputs (batch, 8) and targets (batch, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean square error."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(x, y)


@scene
def model(names: Names) -> None:
    """A `model`, its `loss` of `x` and `y`, a `dataset` of such pairs; `config`, also as files."""
    x = torch.randn(16, 8)
    dataset = torch.utils.data.TensorDataset(x, x.flip(1))
    net = Net()
    names |= {
        "model": net,
        "loss": net(x[:4], x.flip(1)[:4]),
        "dataset": dataset,
        "data": dataset,
        "x": x[:4],
        "y": x.flip(1)[:4],
        "config": CONFIG,
    }
    for name in ("ds_config.json", "ds.json"):
        write_once(name, json.dumps(CONFIG))
    sys.argv = ["train.py", "--deepspeed_config", "ds_config.json"]


@scene
def engine(names: Names) -> None:
    """The scene `model`, an `engine` of it with `optimizer`, `loader`, `scheduler`, and a `loss` after a forward."""
    model(names)
    made = mpispeed.initialize(model=names["model"], config=CONFIG, training_data=names["dataset"])
    names |= dict(zip(("engine", "optimizer", "loader", "scheduler"), made, strict=True))
    names["loss"] = names["engine"](names["x"], names["y"])


class Masked(nn.Module):
    """A block that takes a mask (batch, tokens, 1) beside its input (batch, tokens, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Changes what is not masked."""
        return x + mask * torch.tanh(self.inner(x))


@scene
def inside_a_model(names: Names) -> None:
    """Lines of a model's forward: `self` with `blocks`; `x` (2, 6, 8), `mask`, `scores`; no slicing group, `mpu`."""
    model(names)
    names |= {
        "self": SimpleNamespace(blocks=[Masked(), Masked()]),
        "x": torch.randn(2, 6, 8, requires_grad=True),
        "mask": torch.ones(2, 6, 1),
        "scores": torch.randn(2, 4, 6, 6),
        "dropout": nn.Dropout(0.1),
        "mpu": None,
    }


@scene
def tensors(names: Names) -> None:
    """A tensor `x`, and `parts`, one tensor of its size for each of two ranks."""
    x = torch.ones(8)
    names |= {"x": x, "parts": [torch.empty_like(x) for _ in range(2)]}


class Words(nn.Module):
    """An embedding, a layer, and a frozen head, which a checkpoint has in bfloat16 only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 64, bias=False).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of guessing each token from itself."""
        return nn.functional.cross_entropy(self.head(self.layer(self.embed(tokens))).float(), tokens)


@scene
def hdf5_files(names: Names) -> None:
    """A file of each kind: the checkpoint save_dir/global_step500, runs/run.h5, corpus.h5; and read_checkpoint.c."""
    config = CONFIG | {"bf16": {"enabled": True}, "run_record": {"enabled": True, "path": "runs", "every": 1}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine = mpispeed.initialize(model=Words(), config=config)[0]
    for step in range(12):
        engine.backward(engine(torch.arange(4 * step, 4 * step + 4)))
        engine.step()
    engine.save_checkpoint("save_dir", tag="global_step500", client_state={"epoch": 3})
    engine.destroy()
    make_store(Path("corpus.h5"), documents=20)
    shutil.copy(Path(ROOT, "docs/examples/read_checkpoint.c"), ".")


@scene
def two_engines(names: Names) -> None:
    """Engines `a`, which gives an output, and `b`, which gives a loss, of `x`."""
    model(names)
    a, *_ = mpispeed.initialize(model=nn.Linear(8, 8), config=CONFIG)
    b, *_ = mpispeed.initialize(model=Norm(), config={**CONFIG, "zero_optimization": {"stage": 3}})
    names |= {"a": a, "b": b, "teacher_loss": lambda y: y.abs().mean()}


class Norm(nn.Module):
    """A loss of an input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of the outputs."""
        return self.inner(x).square().mean()


@scene
def curriculum(names: Names) -> None:
    """An engine with a curriculum of a schedule that a function gives."""
    model(names)
    section = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 64,
        "max_difficulty": 2048,
        "schedule_type": "custom",
    }
    config = {**CONFIG, "curriculum_learning": section}
    made = mpispeed.initialize(model=names["model"], config=config, training_data=names["dataset"])
    names["engine"] = made[0]


@scene
def pipeline(names: Names) -> None:
    """An `engine` of a pipeline of one stage, with a curriculum of lengths."""
    section = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
    }
    model = mpispeed.PipelineModule([nn.Linear(8, 8)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {**CONFIG, "curriculum_learning": section}
    names["engine"] = mpispeed.initialize(model=model, config=config)[0]


class LeNet(nn.Sequential):
    """LeNet-5 for images (batch, 1, 32, 32)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(120, 84),
            nn.Tanh(),
            nn.Linear(84, 10),
        )


class Speaker(nn.Linear):
    """A layer that can also be asked to generate."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """Two passes."""
        return self(self(x))


@scene
def flops(names: Names) -> None:
    """A `lenet`; a `model` with `generate` for `inputs`, and with a `loss` for a `batch`, at `step` 1."""
    names |= {"lenet": LeNet(), "model": Speaker(8, 8), "inputs": {"x": torch.ones(2, 8)}}
    names |= {"batch": torch.ones(4, 8), "step": 1}
