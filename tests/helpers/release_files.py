"""Small files of a release that later ones have to read: how they are made, and what is expected of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpispeed
from mpispeed.base.version import VERSION
from mpispeed.curriculum.index_file import MMapIndexedDatasetBuilder
from mpispeed.mesh import start
from mpispeed.record.facts import versions
from mpispeed.record.writer import RecordWriter
from mpispeed.token_stores import build_store

FOLDER = Path(__file__).resolve().parents[1] / "releases"
EXPECTED = "expected.json"
STEPS = 3
TEXTS = ["a first text", "", "and a longer one, of more tokens"]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "adamw-stage-2": {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    },
    "lion-bf16-stage-3": {
        "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
    },
}


def model() -> nn.Module:
    """A model of 44 parameters with always the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def settings(name: str) -> dict[str, Any]:
    """The config of a checkpoint."""
    return {"train_batch_size": 12, **CHECKPOINTS[name]}


def step(engine: Any, number: int) -> float:
    """One step on samples that depend on its number only; returns the loss."""
    made = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(12, 4, generator=made), torch.randn(12, 2, generator=made)
    share = 12 // engine.world_size
    own = slice(engine.global_rank * share, (engine.global_rank + 1) * share)
    dtype = next(engine.module.parameters()).dtype
    loss = nn.functional.mse_loss(engine(inputs[own].to(dtype)).float(), targets[own])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def make(folder: Path) -> None:
    """Write all files of this release below `folder`, which is not there yet.

    Collective over: all ranks.
    """
    comm = start().comm
    expected: dict[str, Any] = {"release": VERSION, "ranks": comm.size, "checkpoints": {}}
    losses = {}
    for name in CHECKPOINTS:
        engine = mpispeed.initialize(model=model(), config=settings(name))[0]
        losses[name] = [step(engine, number) for number in range(STEPS)]
        engine.save_checkpoint(str(folder / name), tag="step3", client_state={"note": "of this release"})
        expected["checkpoints"][name] = weights(engine)
        engine.destroy()
    if comm.rank == 0:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        (folder / "texts.jsonl").write_text(lines)
    comm.barrier()
    build_store(folder / "tokens.h5", [folder / "texts.jsonl"], tokenizer="byte")
    if comm.rank == 0:
        index = MMapIndexedDatasetBuilder(str(folder / "index.bin"))
        index.add_items([torch.arange(3).numpy(), torch.arange(5).numpy()])
        index.finalize(str(folder / "index.idx"))
        expected["losses"] = losses["adamw-stage-2"]
        _record(folder / "run.h5", expected["losses"])
        (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")
    comm.barrier()


def _record(path: Path, losses: list[float]) -> None:
    """A run record of rank 0's losses, without words on the machine that wrote it."""
    told = {"config": settings("adamw-stage-2"), "versions": versions(), "command": {"words": ["train.py"]}}
    writer = RecordWriter(path, told, reserved={"rows": 16, "names": 256, "notes": 512, "spans": 4})
    for number, loss in enumerate(losses, 1):
        writer.row("Train/Samples/train_loss", loss, step=number, samples=12 * number)
    writer.note("save", step=STEPS, tag="step3")
    writer.close()


def weights(engine: Any) -> dict[str, list[float]]:
    """All parameters in fp32 by their names.

    Collective over: all ranks.
    """
    with mpispeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().float().flatten().tolist() for name, param in engine.module.named_parameters()}
