"""What the step benchmarks share: the model, one training step of every contender, rounds in turns, the record."""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpispeed

SIZES = {  # layers, heads, width, vocabulary, global batch
    "82m": (6, 12, 768, 50257, 4),  # the shape of distilgpt2
    "7.4m": (4, 6, 384, 512, 8),
}
LENGTH = 128
ADAM = {"lr": 1e-4, "weight_decay": 0.01}

Step = Callable[[torch.Tensor], None]


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
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def join() -> Any:
    """Join MPI; returns the world. Each rank computes with one thread, also where two nodes are one machine."""
    os.environ["OMP_NUM_THREADS"] = "1"  # else threads are dealt by the ranks of a node
    world = mpispeed.init_distributed()
    torch.set_num_threads(1)
    return world


def join_gloo() -> Any:
    """Join MPI, and torch's process group over gloo with the same ranks; returns the world. One thread per rank."""
    world = join()
    torch.distributed.destroy_process_group()  # the default group over MPI
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(world.comm.share(_free_port()))
    torch.distributed.init_process_group("gloo", rank=world.rank, world_size=world.size)
    return world


def make_ddp(model: nn.Module, clipping: float = 0.0, group: Any = None) -> Step:
    """Torch's data parallelism with its fastest CPU optimizer and gradients as bucket views."""
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    return _torch_step(wrapped, clipping)


def make_fsdp(model: GPT, clipping: float = 0.0, mesh: Any = None) -> Step:
    """Torch's FSDP2: every block and the root are cut, parameters are whole while a block runs."""
    mesh = mesh or torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _torch_step(fully_shard(model, mesh=mesh), clipping)


def make_deepspeed(model: nn.Module, train_batch: int, stage: int, clipping: float = 0.0) -> Step:
    """DeepSpeed's engine with torch's optimizer, in fp32, on the ranks of torch's default group."""
    import deepspeed

    for name in [name for name, value in vars(nn.Parameter).items() if isinstance(value, property)]:
        delattr(nn.Parameter, name)  # ours, under its names, which it sets; torch has none of them
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    settings = {
        "train_micro_batch_size_per_gpu": train_batch // torch.distributed.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clipping,
    }
    deepspeed.init_distributed("gloo")
    return engine_step(deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0])


def _torch_step(model: nn.Module, clipping: float) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(ids).backward()
        if clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()

    return step


def make_engine(model: nn.Module, train_batch: int, zero: Mapping[str, Any], clipping: float = 0.0, **more: Any) -> Any:
    """An engine with the same optimizer, in fp32 unless `more` says otherwise; `zero` is `zero_optimization`."""
    settings = {
        "train_batch_size": train_batch,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": dict(zero),
        "gradient_clipping": clipping,
        **more,
    }
    engine, *_ = mpispeed.initialize(model=model, config=settings)
    return engine


def engine_step(engine: Any) -> Step:
    """One training step of an engine."""

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(ids))
        engine.step()

    return step


def token_ids(shape: tuple[int, ...], batch: int, rank: int) -> torch.Tensor:
    """This rank's part of a global batch; other tokens on every rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randint(0, shape[-1], (batch, LENGTH + 1), generator=generator)


def take_turns(
    contenders: Mapping[str, Callable[[], None]], barrier: Callable[[], None], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step of each contender in each round; whatever else the machine does hits all of them.

    Collective over: all ranks.
    """
    for step in contenders.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            barrier()
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def speed_ratios(seconds: Mapping[str, list[float]], base: str, name: str) -> tuple[float, float]:
    """How many times as fast as `base`: ratio of the medians, and median of the rounds' ratios."""
    of_medians = statistics.median(seconds[base]) / statistics.median(seconds[name])
    by_round = [theirs / ours for theirs, ours in zip(seconds[base], seconds[name], strict=True)]
    return of_medians, statistics.median(by_round)


def write_record(path: Path | None, benchmark: str, options: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write figures with date, machine and commit; nothing without a path."""
    if path is None:
        return
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git.stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "options": dict(options),
        "results": dict(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_results(path: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a record, if there is one and its options were the same."""
    record = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    return dict(record["results"]) if record.get("options") == dict(options) else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
