"""Peaks of a rank at each stage, beside what it had before: while an engine is made, and in its steps."""

import ctypes
import gc
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import mpispeed

WIDTH, LAYERS, STEPS = 1536, 12, 3


class Layer(nn.Module):
    """A block of 9 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x + self.linear(x), dim=-1)


class Model(nn.Module):
    """Blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def status(key: str) -> int:
    """Units: bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def begin() -> int:
    """Let the peak start anew; returns the bytes in memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def measure(stage: int, *, is_born_cut: bool) -> tuple[int, int]:
    """Most bytes of an engine while it is made, and in its steps."""
    before = begin()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    with mpispeed.zero.Init(config_dict_or_path=config) if is_born_cut else nullcontext():
        model = Model()
    engine = mpispeed.initialize(model=model, config=config)[0]
    made = status("VmHWM")
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    peak = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.step()
    steps = max(status("VmHWM"), peak if peak > made else 0)
    engine.destroy()
    return made - before, steps - before


def main() -> None:
    """Print the largest of all ranks and of two tries.

    A system that is short of memory drops pages of libraries that nobody reads: a peak seems lower then, never higher.
    """
    world = mpispeed.init_distributed()
    measure(3, is_born_cut=False)  # what is loaded late
    cases = {f"stage {stage}": (stage, False) for stage in (3, 2, 1)} | {"born cut": (3, True)}
    tries = [{name: measure(stage, is_born_cut=cut) for name, (stage, cut) in cases.items()} for _ in range(2)]
    told = [found for rank in world.comm.gather_objects(tries) for found in rank]
    if world.rank == 0:
        most = {key: [max(found[key][i] for found in told) for i in (0, 1)] for key in cases}
        sys.stdout.write(json.dumps(most) + "\n")


main()
