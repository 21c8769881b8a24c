"""Tokens per second of stages 0, 1 and 2 beside torch's DistributedDataParallel on gloo, in one run.

    mpispeed run -n 2 benchmarks/step/compare_ddp.py --size 82m

Contenders take turns inside every round, so that whatever else the machine does hits all of them; the figures
are medians over rounds, and ratios to DDP. Each rank computes with one thread. DDP gets torch's fastest
CPU optimizer (AdamW, fused) and gradients as bucket views.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpispeed

SIZES = {  # layers, heads, width, vocabulary, global batch
    "82m": (6, 12, 768, 50257, 4),  # the shape of distilgpt2
    "7.4m": (4, 6, 384, 512, 8),
}
LENGTH = 128


class Block(nn.Module):
    """A GPT-2 block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: [batch, length, width] in and out."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT-2 with tied embedding that returns its loss."""

    def __init__(self, layers: int, heads: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each next token. Shapes: ids [batch, length + 1]."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_ddp(shape: tuple[int, ...], rank: int, size: int) -> Callable[[torch.Tensor], None]:
    """One training step of torch's own data parallelism."""
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(*shape), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(ids).backward()
        optimizer.step()

    return step


def make_engine(shape: tuple[int, ...], stage: int, train_batch: int, overlap: bool) -> Callable[[torch.Tensor], None]:
    """One training step of mpispeed."""
    torch.manual_seed(1)
    settings = {
        "train_batch_size": train_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "overlap_comm": overlap},
    }
    engine, *_ = mpispeed.initialize(model=GPT(*shape), config=settings)

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(ids))
        engine.step()

    return step


def main() -> None:
    """Run all contenders and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="82m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in each round")
    parser.add_argument("--overlap", action="store_true", help="overlap_comm: true for the stages")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = mpispeed.init_distributed()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(world.comm.share(_free_port()))
    torch.distributed.init_process_group("gloo", rank=world.rank, world_size=world.size)
    *shape, batch = SIZES[options.size]
    contenders = {"ddp": make_ddp(tuple(shape), world.rank, world.size)}
    for stage in (0, 1, 2):
        contenders[f"stage {stage}"] = make_engine(tuple(shape), stage, batch, options.overlap)
    torch.manual_seed(10 + world.rank)
    ids = torch.randint(0, shape[-1], (batch // world.size, LENGTH + 1))
    for step in contenders.values():
        step(ids)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, step in contenders.items():
            world.comm.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                step(ids)
            world.comm.barrier()
            seconds[name].append((time.perf_counter() - start) / options.steps)
    if world.rank == 0:
        _report(options, seconds, batch * LENGTH, world.size)
    torch.distributed.destroy_process_group()


def _report(options: argparse.Namespace, seconds: dict[str, list[float]], tokens: int, ranks: int) -> None:
    base = statistics.median(seconds["ddp"])
    figures = {}
    print(f"{options.size}, {ranks} ranks, {tokens} tokens per step, {options.rounds} rounds x {options.steps} steps")
    for name, times in seconds.items():
        median = statistics.median(times)
        figures[name] = {"seconds": times, "tokens_per_second": tokens / median, "ratio_to_ddp": base / median}
        spread = (max(times) - min(times)) / median
        print(f"{name:8s} {tokens / median:9.1f} tokens/s   {base / median:5.3f} x DDP   spread {spread:.0%}")
    if options.json:
        record = {
            "benchmark": "step/compare_ddp",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
            ).stdout.strip(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "options": {"size": options.size, "rounds": options.rounds, "overlap": options.overlap, "ranks": ranks},
            "results": figures,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
