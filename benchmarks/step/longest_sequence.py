"""Longest sequence that trains in 4 GiB of a rank on 1, 2 and 4 ranks, as `mpispeed plan` says it, tried by one step.

    python benchmarks/step/longest_sequence.py --json benchmarks/results/longest-sequence.json

Ranks share each sequence in a ring, with states at stage 2. `mpispeed plan --longest-sequence` gets what a rank has
left of the limit after Python, torch, MPI and the engine: the most resident memory (VmHWM of Linux) of a step of 64
tokens, less what the plan says of it. Then a job makes one step at the length that it gives and one 10 % above; given
is the most resident memory of a rank, which has to be within the limit, and above it. The peer is a plain loop of torch
with its own attention and AdamW on one process, whose longest sequence a line through the memory at two lengths gives;
it is tried by a step too. Large blocks of memory are returned at once (MALLOC_MMAP_THRESHOLD_), for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
from torch import nn

import mpispeed
from mpispeed.sequence import attention, cross_entropy

WIDTH, HEADS, INNER, LAYERS, VOCABULARY = 128, 2, 16384, 4, 256
GRAIN, SHORT = 64, (1024, 2048)
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
MIB = 1 << 20


class Block(nn.Module):
    """A GPT-2 block with a wide inner layer, so that memory is full before attention takes long."""

    def __init__(self, is_peer: bool) -> None:
        super().__init__()
        self.is_peer = is_peer
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: [batch, length, width] in and out."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        if self.is_peer:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = attention(q, k, v, causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder that returns its loss; labels are shifted already."""

    def __init__(self, is_peer: bool = False) -> None:
        super().__init__()
        self.tokens, self.is_peer = nn.Embedding(VOCABULARY, WIDTH), is_peer
        self.blocks = nn.ModuleList(Block(is_peer) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss. Shapes: [batch, length] both."""
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if self.is_peer:
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss: torch.Tensor = cross_entropy(logits, labels)
        return loss


def settings(ranks: int) -> dict[str, Any]:
    """The config of a job."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": ranks,
        "sequence_parallel": {"ring_size": ranks},
        "optimizer": {"type": "AdamW", "params": peers.ADAM},
        "zero_optimization": {"stage": 2, "overlap_comm": False},
    }


def train(options: argparse.Namespace) -> None:
    """The job: one step; writes the most resident memory of a rank."""
    ids = torch.randint(VOCABULARY, (1, options.length), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    if options.peer:
        torch.set_num_threads(1)
        model = GPT(is_peer=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **peers.ADAM)
        start = time.perf_counter()
        loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        rows = [(_most_bytes(), time.perf_counter() - start)]
    else:
        world = peers.join()
        engine = mpispeed.initialize(model=GPT(), config=settings(world.size))[0]
        start = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids)
        engine.backward(loss)
        engine.step()
        rows = world.comm.gather_objects((_most_bytes(), time.perf_counter() - start))
        if world.rank:
            return
    found = {"peak": max(row[0] for row in rows), "seconds": rows[0][1], "loss": loss.item()}
    options.json.write_text(json.dumps(found))


def _most_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def step_of(length: int, ranks: int, *, is_peer: bool = False) -> dict[str, Any]:
    """Run a job of one step."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        start = [sys.executable] if is_peer else [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks)]
        words = ["--length", str(length), "--json", str(output), *["--peer"] * is_peer]
        subprocess.run([*start, __file__, *words], check=True, env={**os.environ, **ENVIRONMENT})
        found: dict[str, Any] = json.loads(output.read_text())
    print(
        f"{ranks} ranks, {length} tokens{' (torch)' * is_peer}: {found['peak'] / MIB:.0f} MiB, {found['seconds']:.0f} s"
    )
    return found


def plan_of(ranks: int, memory: int, *more: str) -> dict[str, Any]:
    """What `mpispeed plan` says of a job whose ranks have so many bytes each."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "ds.json"
        config.write_text(json.dumps(settings(ranks)))
        words = ["plan", str(config), "-n", str(ranks), "--model", f"{Path(__file__).stem}:GPT"]
        start = [sys.executable, "-m", "mpispeed.cli.main", *words, "--memory", str(ranks * memory), "--json", *more]
        done = subprocess.run(start, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
    if not answer["ok"]:
        sys.exit(answer["error"])
    return answer


def ours(ranks: int, limit: int) -> dict[str, Any]:
    """The longest sequence on so many ranks, and steps at it and 10 % above."""
    short = plan_of(ranks, limit, "--sequence-length", str(GRAIN))
    counted = short["train_bytes"] + short["activations"]["peak_bytes"]
    besides = step_of(GRAIN, ranks)["peak"] - counted
    longest = plan_of(ranks, limit - besides, "--longest-sequence")["longest_sequence"]
    at, above = step_of(longest, ranks), step_of(int(1.1 * longest), ranks)
    return {"besides_bytes": besides, "longest": longest, "at": at, "above": above}


def peer(limit: int) -> dict[str, Any]:
    """The longest sequence of torch on one process, and a step at it."""
    peaks = [step_of(length, 1, is_peer=True)["peak"] for length in SHORT]
    slope = (peaks[1] - peaks[0]) / (SHORT[1] - SHORT[0])
    longest = int(SHORT[1] + (limit - peaks[1]) / slope) // GRAIN * GRAIN
    return {"longest": longest, "at": step_of(longest, 1, is_peer=True)}


def main() -> None:
    """One set of jobs for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4, help="limit of a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.length:
        train(options)
        return
    limit = int(options.gib * 1024 * MIB)
    figures: dict[str, Any] = {"torch": peer(limit)}
    base = figures["torch"]["longest"]
    for ranks in options.ranks:
        row = figures[str(ranks)] = ours(ranks, limit)
        row["times_torch"] = round(row["longest"] / base, 3)
        row["is_within"], row["is_above"] = row["at"]["peak"] <= limit, row["above"]["peak"] > limit
        print(f"{ranks} ranks: {row['longest']} tokens, {row['times_torch']} x torch on one; goal {0.9 * ranks:.1f}")
        peers.write_record(options.json, "step/longest_sequence", {"gib": options.gib}, figures)


if __name__ == "__main__":
    main()
