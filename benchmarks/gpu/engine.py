"""What the engine costs on a GPU: the time of a step of a GPT over that of a plain loop of torch.

    python benchmarks/gpu/engine.py                  one rank: ZeRO stages 0 and 3 against plain torch

Two ranks that share the GPU are in shared.py.

Both sides train in bf16 with fp32 masters, clipping by the global norm and AdamW; the plain loop is the shortest that
does so. Sizes are those of a step of 100 ms or more on an H200. Ten steps are timed at a time by the clock of the host,
from an idle device to an idle device, sides in turns, each with batches out of page-locked memory: a side that waits
for the device within a step loses the lead that the host has over it, and that counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import need_gpu, parser_of, write_results
from torch import nn
from torch.nn import functional as F

import mpispeed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gpt

TARGETS = {"stage 0": 0.02, "stage 3": 0.04}
LR, CLIP = 1e-4, 1.0
SHAPE = gpt.Shape(layers=24, heads=16, width=1024, block=1024)
MICRO = 16
STEPS = 10  # timed at a time

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], object]


class Loss(nn.Module):
    """The model and its loss."""

    def __init__(self, shape: gpt.Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt.GPT(shape)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean over tokens."""
        scores = self.model(x)
        return F.cross_entropy(scores.float().flatten(0, 1), y.flatten())


def batch_of(shape: gpt.Shape, seed: int, size: int = MICRO) -> Batch:
    """On the host: inputs and what follows them: counting bytes with a step of each row's own."""
    dice = torch.Generator().manual_seed(seed)
    first, step = (torch.randint(1, 256, (size, 1), generator=dice) for _ in range(2))
    rows = (first + step * torch.arange(shape.block + 1)) % 256
    return rows[:, :-1].contiguous().pin_memory(), rows[:, 1:].contiguous().pin_memory()


def settings(stage: int) -> dict[str, Any]:
    """The config."""
    return {
        "train_batch_size": MICRO,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }


def plain_step(shape: gpt.Shape) -> Step:
    """One step of a loop without engine."""
    model = Loss(shape).cuda()
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=0.01, fused=True)

    def step(batch: Batch) -> None:
        model(*(part.cuda(non_blocking=True) for part in batch)).backward()
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def engine_step(shape: gpt.Shape, stage: int) -> Step:
    """One step of an engine."""
    engine = mpispeed.initialize(model=Loss(shape), config=settings(stage))[0]

    def step(batch: Batch) -> None:
        engine.backward(engine(*(part.to(engine.device, non_blocking=True) for part in batch)))
        engine.step()

    return step


def timed(step: Step, batches: list[Batch]) -> float:
    """Seconds of a step, of several from an idle device to an idle device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(batches)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Median step of each side, in turns, and what engines add."""
    batches = [batch_of(SHAPE, seed) for seed in range(STEPS)]
    sides = {"plain torch": plain_step(SHAPE)}
    sides |= {f"stage {stage}": engine_step(SHAPE, stage) for stage in (0, 3)}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(1 + rounds):
        for name, step in sides.items():
            seconds = timed(step, batches)
            if turn:
                found[name].append(seconds)
    base = statistics.median(found["plain torch"])
    rows = []
    for name, seconds in found.items():
        median = statistics.median(seconds)
        row: dict[str, Any] = {"side": name, "step_seconds": median, "overhead": median / base - 1.0}
        if name in TARGETS:
            row |= {"target": TARGETS[name], "is_reached": row["overhead"] <= TARGETS[name]}
        rows.append(row)
        print(f"{name:12} {1e3 * median:8.2f} ms  {100 * (median / base - 1.0):+6.2f} %")
    return rows


def main() -> None:
    """Measure, print, record."""
    options = parser_of(__doc__).parse_args()
    need_gpu()
    rows = measure(options.rounds)
    write_results("engine", rows, options=vars(options), path=options.json)
    if any(row["overhead"] > row["target"] for row in rows if "target" in row):
        print("above the targets")


if __name__ == "__main__":
    main()
