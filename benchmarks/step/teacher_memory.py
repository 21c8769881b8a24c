"""Memory of a rank that trains a student, for each way to keep the teacher, and without one.

    python benchmarks/step/teacher_memory.py -n 2 --path FOLDER --json benchmarks/results/teacher-memory.json

Every way is a job of its own. The teacher is a GPT, the student has 2 of its 24 layers and trains at stage 3.
"whole": each rank has the teacher; "shards": it is built in `zero.Init` and kept at stage 3; "files": so too, in swap
files below FOLDER. Given is the most resident memory (VmHWM of Linux) of a rank in steps after the first, above that
of the same job without a teacher; beside it the bytes of the teacher's parameters, and the time of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch

import mpispeed
from mpispeed.compression import Teacher, logits_loss

WAYS = ("none", "whole", "shards", "files")
LAYERS, HEADS, WIDTH, VOCABULARY, BATCH = 24, 12, 768, 4096, 2
AHEAD = 8_000_000  # elements that are fetched ahead, those of a layer; the default is most of this teacher
MIB = 1 << 20


class GPT(peers.GPT):
    """A GPT-2 that returns its logits."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers, HEADS, WIDTH, VOCABULARY)
        torch.nn.init.normal_(self.tokens.weight, std=0.02)  # else all models predict their input, with certainty

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Shapes: ids [batch, length]; [batch, length, vocabulary]."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_teacher(way: str, folder: Path) -> Teacher:
    """A teacher with random weights."""
    torch.manual_seed(1)
    if way == "whole":
        return Teacher(GPT(LAYERS))
    zero: dict[str, Any] = {"stage": 3, "stage3_prefetch_bucket_size": AHEAD}
    if way == "files":
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with mpispeed.zero.Init(config_dict_or_path=config):
        model = GPT(LAYERS)
    return Teacher(model, zero=zero)


def measure(options: argparse.Namespace) -> None:
    """The job of one way."""
    world = peers.join()
    teacher = None if options.way == "none" else make_teacher(options.way, options.path)
    torch.manual_seed(2)
    student = GPT(2)
    config = {
        "train_batch_size": BATCH * world.size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    engine = mpispeed.initialize(model=student, config=config)[0]
    draws, seconds, losses = torch.Generator().manual_seed(3 + world.rank), [], []
    for step in range(options.steps + 1):
        if step == 1:
            ctypes.CDLL(None).malloc_trim(0)  # what the making of the models has left in the heap
            Path("/proc/self/clear_refs").write_text("5")
        ids = torch.randint(VOCABULARY, (BATCH, peers.LENGTH), generator=draws)
        start = time.perf_counter()
        logits = engine(ids)
        loss = logits.float().logsumexp(-1).mean() if teacher is None else logits_loss(logits, teacher(ids))
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    size = 0 if teacher is None else sum(param.numel() * 4 for param in teacher.module.parameters())
    rows = world.comm.gather_objects((peak, seconds[1:], losses))
    if world.rank == 0:
        found = {"peak": max(row[0] for row in rows), "teacher": size, "seconds": rows[0][1], "losses": rows[0][2]}
        options.json.write_text(json.dumps(found))


def main() -> None:
    """One job for each way, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="folder for swap files")
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options)
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            output = Path(folder) / f"{way}.json"
            words = ["--path", str(options.path), "--steps", str(options.steps), "--way", way, "--json", str(output)]
            start = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(options.ranks)]
            subprocess.run([*start, __file__, *words], check=True)
            figures[way] = json.loads(output.read_text())
    base = figures["none"]["peak"]
    for way, row in figures.items():
        row["above_none"] = row["peak"] - base
        times = 1000 * statistics.median(row["seconds"])
        size = row["teacher"] or 1
        print(f"{way:8s} {row['above_none'] / MIB:8.0f} MiB, {row['above_none'] / size:5.2f} of it; {times:6.0f} ms")
    losses = [figures[way]["losses"] for way in WAYS[1:]]
    print(f"losses equal: {losses[0] == losses[1] == losses[2]}, the last one {losses[0][-1]:.4f}")
    settings = {"ranks": options.ranks, "steps": options.steps, "layers": LAYERS, "width": WIDTH}
    peers.write_record(options.json, "step/teacher_memory", settings, figures)


if __name__ == "__main__":
    main()
