"""The engine whose state is saved, shared by the jobs of `compare.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import mpispeed

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))

from stack import Stack


def parser(text: str | None) -> argparse.ArgumentParser:
    """Arguments of all jobs."""
    made = argparse.ArgumentParser(description=text)
    made.add_argument("folder")
    made.add_argument("--width", type=int, required=True)
    made.add_argument("--layers", type=int, required=True)
    made.add_argument("--output", required=True)
    return made


def make_engine(options: argparse.Namespace) -> Any:
    """Stage 1 with Adam in fp32: masters and two moments, 12 bytes per parameter."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    return mpispeed.initialize(model=Stack(options.layers, options.width), config=settings)[0]


def train(engine: Any) -> None:
    """One step, so that no state is zero."""
    engine.backward(engine(torch.randn(1, engine.module.layers[0].in_features)))
    engine.step()
