"""Scenes of pages: what the names in their blocks are, and which files lie in their folder.

A page names its scenes in a comment at its top, `<!-- scene: model -->`, and others from where they begin. Each scene
is a function that gets the page's namespace, adds to it, and may write files; the folder is the current one. Every page
has `torch`, `nn`, `os` and `mpispeed`. Models are of a size that computes in milliseconds.

On several ranks all of them call a scene, in one folder.
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
    """A `model` whose loss comes from `x` and `y`, a `dataset` of such pairs, a config as `config`, dict and files."""
    x = torch.randn(16, 8)
    dataset = torch.utils.data.TensorDataset(x, x.flip(1))
    names |= {
        "model": Net(),
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
