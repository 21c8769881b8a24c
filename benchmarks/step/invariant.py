"""A training step whose sums do not depend on the ranks, beside one with sums in rank order.

    mpirun -n 2 python benchmarks/step/invariant.py --json benchmarks/results/invariant.json

Both have the same micro-batches and threads (1), and take turns in one process; the slower rank counts, medians over
rounds of the ratio of neighbours. With 2 micro-batches of a rank its gradients are one sum at stages 0 and 1, with 3
they are two, which are both sent. At stages 2 and 3 micro-batches are summed over ranks one by one in both. The last
column has the bytes that a rank sends in a step, beside those of `ordered`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpispeed
from mpispeed import comm

WIDTH, DEPTH, ROWS = 512, 4, 64


class Net(nn.Module):
    """Residual blocks of two layers; the loss is a mean square."""

    def __init__(self) -> None:
        super().__init__()
        inner = 4 * WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)) for _ in range(DEPTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [rows, WIDTH]."""
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def engine_of(reduction: str, stage: int, dtype: str, steps: int) -> Any:
    """An engine for one rank's `steps` micro-batches of a step. Collective over: all ranks."""
    torch.manual_seed(0)
    settings = {
        "train_batch_size": ROWS * steps * comm.get_world_size(),
        "train_micro_batch_size_per_gpu": ROWS,
        "reduction": reduction,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    return mpispeed.initialize(model=Net(), config=settings)[0]


def step_seconds(engine: Any, batch: torch.Tensor) -> float:
    """One update. Collective over: all ranks."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(batch))
        engine.step()
    slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    comm.all_reduce(slowest, comm.ReduceOp.MAX)
    return float(slowest)


def sent_bytes(engine: Any, batch: torch.Tensor) -> int:
    """Bytes that this rank sends in a step. Collective over: all ranks."""
    trace = engine.mpispeed.parts.mesh.comm_trace
    trace.reset()
    step_seconds(engine, batch)
    return sum(entry.bytes for entry in trace.entries().values())


def measure(stage: int, dtype: str, steps: int, rounds: int) -> dict[str, Any]:
    """One row. Collective over: all ranks."""
    torch.manual_seed(1 + comm.get_rank())
    engines = {name: engine_of(name, stage, dtype, steps) for name in ("ordered", "invariant")}
    batch = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    for engine in engines.values():
        step_seconds(engine, batch)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        for name in sorted(engines, reverse=bool(number % 2)):
            taken[name].append(step_seconds(engines[name], batch))
    ratios = [after / before for before, after in zip(taken["ordered"], taken["invariant"], strict=True)]
    sent = {name: sent_bytes(engine, batch) for name, engine in engines.items()}
    for engine in engines.values():
        engine.destroy()
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "stage": stage, "dtype": dtype, "micro_batches": steps, "seconds": seconds,
        "ratio": statistics.median(ratios), "sent_bytes": sent,
    }  # fmt: skip


def main() -> None:
    """Collective over: all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    mpispeed.init_distributed()
    torch.set_num_threads(1)
    rows = []
    cases = [(stage, "fp32", steps) for steps in (2, 3) for stage in (0, 1, 2, 3)]
    for stage, dtype, steps in [*cases, (1, "bf16", 2), (2, "bf16", 2)]:
        row = measure(stage, dtype, steps, args.rounds)
        rows.append(row)
        if comm.get_rank() == 0:
            sent = row["sent_bytes"]
            print(
                f"stage {stage} {dtype} {steps} micro-batches: {row['ratio']:.2f} of ordered "
                f"({1e3 * row['seconds']['invariant']:.0f} and {1e3 * row['seconds']['ordered']:.0f} ms), "
                f"{sent['invariant'] / max(sent['ordered'], 1):.2f} of its bytes",
                flush=True,
            )
    if comm.get_rank() == 0 and args.json:
        found = {"ranks": comm.get_world_size(), "threads": 1, "rounds": args.rounds, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
