"""Time that steps wait for data: a step of 30 ms beside a data set that takes 20 ms for a batch, read in several ways.

    mpispeed run -n 1 benchmarks/data/stalls.py [--json FILE] [--batch-ms 20] [--step-ms 30] [--computes]

A step computes as many products of matrices as were done in its time at the start; the data set waits, as for a file
system, or computes with --computes. Each way trains some epochs in turn with all others: the step alone (one batch
again and again), batches read when they are wanted, ahead by a thread, and by two worker processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "step"))
import peers

import mpispeed

STEPS = 20
ROUNDS = 5
MICRO_BATCH = 8
LENGTH = 2048
WAYS: dict[str, dict[str, Any] | None] = {
    "step alone": None,
    "no batch ahead": {"prefetch": 0},
    "2 ahead by a thread": {"prefetch": 2},
    "2 worker processes": {"workers": 2, "persistent_workers": True},
}


class Slow(Dataset[dict[str, torch.Tensor]]):
    """Batches of token numbers that take a known time."""

    def __init__(self, ranks: int, seconds: float, products: int) -> None:
        self._length, self._seconds, self._products = STEPS * MICRO_BATCH * ranks, seconds, products

    def __len__(self) -> int:
        return self._length

    def read_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """One batch. Shapes: [MICRO_BATCH, LENGTH]."""
        if self._products:
            compute(self._products)
        else:
            time.sleep(self._seconds)
        return {"input_ids": torch.tensor(indices)[:, None].expand(-1, LENGTH).contiguous()}


def compute(products: int) -> None:
    """Multiply matrices."""
    x = torch.eye(256)
    for _ in range(products):
        x = x @ x


def products_in(seconds: float) -> int:
    """Products that this process computes in some time."""
    compute(20)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        compute(100)
        rates.append(100 / (time.perf_counter() - began))
    return round(seconds * max(rates))


class Busy(torch.nn.Module):
    """A model whose forward pass computes so many products."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.layer, self._products = torch.nn.Linear(8, 8), products

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A loss. Shapes: input_ids [MICRO_BATCH, LENGTH]."""
        compute(self._products)
        out: torch.Tensor = self.layer(input_ids[:, :8].float()).square().mean()
        return out


def step_ms(engine: Any, batches: Iterator[dict[str, torch.Tensor]]) -> list[float]:
    """Time of each step with the wait for its batch. Collective over: all ranks."""
    engine.mesh.world.comm.barrier()
    found, began = [], time.perf_counter()
    for batch in batches:
        engine.backward(engine(**batch))
        engine.step()
        now = time.perf_counter()
        found.append(1000 * (now - began))
        began = now
    return found


def main() -> None:
    """Measure all ways in turn and tell of them."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--batch-ms", type=float, default=20.0)
    asked.add_argument("--step-ms", type=float, default=30.0)
    asked.add_argument("--computes", action="store_true", help="the data set computes instead of waiting")
    args = asked.parse_args()
    world = peers.join()
    products = products_in(args.step_ms / 1000)
    reads = products_in(args.batch_ms / 1000) if args.computes else 0
    engines: dict[str, Any] = {}
    for name, way in WAYS.items():
        settings = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH, "data_loader": {"stall_warning": 0} | (way or {}),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        }  # fmt: skip
        data = Slow(world.size, args.batch_ms / 1000, reads)
        engines[name] = mpispeed.initialize(model=Busy(products), config=settings, training_data=data)[0]
    fixed = {"input_ids": torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.int64)}
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            alone = WAYS[name] is None
            batches = iter([fixed] * STEPS) if alone else iter(engine.training_dataloader)
            found[name] += step_ms(engine, batches)[1:]  # the first one waits for its batch in every way
    medians = {name: statistics.median(times) for name, times in found.items()}
    results = {
        "ms_per_step": medians,
        "over_the_step_alone": {name: value / medians["step alone"] for name, value in medians.items()},
    }
    if world.rank == 0:
        for name, value in medians.items():
            print(f"{name:20} {value:6.1f} ms per step, {results['over_the_step_alone'][name]:.2f} of the step alone")
        options = {
            "ranks": world.size, "batch_ms": args.batch_ms, "step_ms": args.step_ms, "steps": STEPS * ROUNDS,
            "data_set": "computes" if args.computes else "waits",
        }  # fmt: skip
        peers.write_record(args.json, "data/stalls", options, results)
    for engine in engines.values():
        engine.destroy()


if __name__ == "__main__":
    main()
