"""Two ranks that share one GPU beside one process with the same global batch: stage 3, two slices, two stages.

    python benchmarks/gpu/shared.py                               a GPT of 85 M parameters on the GPU
    python benchmarks/gpu/shared.py --device cpu --small          a try on the host: no figures, only that it runs
    python benchmarks/gpu/shared.py --device standin --small      the same on the device that tests stand in for a GPU

Each side is a job of its own, one after the other, with tensors of the device staged through the host and mapped into
the other rank (MPISPEED_DEVICE_PATH). A step is timed from an idle device to an idle device, several at a time. Losses
of the first steps are compared with those of one process. A job that fails or takes longer than its limit is told, and
the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import need_gpu, parser_of, write_results
from torch import nn

import mpispeed
from mpispeed.launch import plan_launch
from mpispeed.pipe import PipelineModule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gpt
import gpt_layers

ROOT = Path(__file__).resolve().parents[2]
SHAPE, ROWS = gpt.Shape(layers=12, heads=12, width=768, block=1024), 16
SMALL, SMALL_ROWS = gpt.Shape(layers=2, heads=2, width=32, block=32), 8
MICRO_STEPS, STEPS, FIRST = 4, 5, 5  # micro-batches of a pipeline; steps timed at a time; steps whose losses are kept
PATHS = ("staged", "mapped")
LOSSES = 0.01
"""Most relative difference of a loss from that of one process: sums of 16-bit values in another order, some steps."""


@dataclass(frozen=True, slots=True)
class Side:
    """One job.

    Attributes:
        name: in the record.
        ranks: that share the GPU.
        stage: of ZeRO.
        stages: of a pipeline.
        slices: of every layer.
        against: the side whose step is the measure.
        target: most time of a step over that one's.
    """

    name: str
    ranks: int
    stage: int = 0
    stages: int = 1
    slices: int = 1
    against: str = ""
    target: float | None = None


SIDES = (
    Side("one process, stage 0", 1),
    Side("one process, stage 3", 1, stage=3),
    Side("two ranks, stage 3", 2, stage=3, against="one process, stage 3", target=1.3),
    Side("two stages", 2, stages=2, against="one process, stage 0"),
    Side("two slices", 2, slices=2, against="one process, stage 0", target=1.5),
)

Batch = tuple[torch.Tensor, torch.Tensor]


class Loss(nn.Module):
    """The model and its loss."""

    def __init__(self, shape: gpt.Shape) -> None:
        super().__init__()
        self.model = gpt.GPT(shape)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean over tokens."""
        return gpt_layers.cross_entropy(self.model(x), y)


def batch_of(shape: gpt.Shape, rows: int, seed: int) -> Batch:
    """Inputs and what follows them: counting bytes with a step of each row's own."""
    dice = torch.Generator().manual_seed(seed)
    first, step = (torch.randint(1, 256, (rows, 1), generator=dice) for _ in range(2))
    found = (first + step * torch.arange(shape.block + 1)) % 256
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def settings(side: Side, rows: int) -> dict[str, Any]:
    """The config."""
    found: dict[str, Any] = {
        "train_batch_size": rows,
        "gradient_accumulation_steps": MICRO_STEPS if side.stages > 1 else 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": side.stage},
        "steps_per_print": 10**9,
    }
    if side.slices > 1:
        found["tensor_parallel"] = {"autotp_size": side.slices, "injection_policy_tuple": gpt_layers.SLICES}
    return found


def step_of(side: Side, shape: gpt.Shape, rows: int) -> tuple[Any, Callable[[Batch], torch.Tensor]]:
    """The engine of this rank, and a step of the whole batch that gives this rank's loss. Collective over: all ranks.

    Slices and stages see all rows, data ranks their own.
    """
    torch.manual_seed(0)
    model: nn.Module
    if side.stages > 1:
        made, entropy = gpt_layers.layers(shape), gpt_layers.cross_entropy
        model = PipelineModule(made, num_stages=side.stages, loss_fn=entropy, seed_layers=True)
    else:
        model = Loss(shape)
    engine = mpispeed.initialize(model=model, config=settings(side, rows))[0]
    own = rows // engine.mesh["data"].size
    first = engine.mesh.index("data") * own

    def whole(batch: Batch) -> torch.Tensor:
        parts = zip(*(part.chunk(MICRO_STEPS) for part in batch), strict=True)
        return torch.as_tensor(engine.train_batch(iter(parts)))

    def shared(batch: Batch) -> torch.Tensor:
        x, y = (part[first : first + own].to(engine.device, non_blocking=True) for part in batch)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, whole if side.stages > 1 else shared


def way_of(engine: Any) -> str:
    """The way that tensors of the device really take between the ranks; empty for one rank and on the host."""
    groups = (engine.mesh[axis].group for axis in ("pipe", "data", "model"))
    paths = [getattr(group, "device_path", None) for group in groups if group.size > 1]
    if not paths or engine.device.type == "cpu":
        return ""
    return "staged" if paths[0] is None else str(paths[0].name)


def as_rank(side: Side, rounds: int, is_small: bool) -> None:
    """One of the ranks of a job; the first says what came of it."""
    if os.environ["MPISPEED_DEVICE"].startswith("standin"):
        sys.path.insert(0, str(ROOT))
        from tests.helpers.device import stand_in

        stand_in()
    shape, rows = (SMALL, SMALL_ROWS) if is_small else (SHAPE, ROWS)
    engine, step = step_of(side, shape, rows)
    module = torch.get_device_module(engine.device)
    batches = [batch_of(shape, rows, seed) for seed in range(FIRST + STEPS)]
    if engine.device.type == "cuda":
        batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
    losses = torch.stack([step(batch).float().reshape(()) for batch in batches[:FIRST]]).double().cpu()
    engine.mesh["data"].all_reduce(losses, scale=1.0 / engine.mesh["data"].size)
    seconds = []
    for _ in range(1 + rounds):
        module.synchronize()
        began = time.perf_counter()
        for batch in batches[FIRST:]:
            step(batch)
        module.synchronize()
        seconds.append((time.perf_counter() - began) / STEPS)
    if engine.global_rank == 0:
        found = {"way": way_of(engine), "losses": losses.tolist(), "step_seconds": statistics.median(seconds[1:])}
        print("RECORD " + json.dumps(found), flush=True)
    engine.destroy()


def run(side: Side, path: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a job says, or `failed` with the end of what it wrote."""
    words = [sys.executable, __file__, "--as-rank", side.name, "--rounds", str(options.rounds)]
    launch = plan_launch(words + ["--small"] * options.small, side.ranks)
    chosen = {"MPISPEED_DEVICE_PATH": path} if path else {}
    environment = {**os.environ, **launch.added, "MPISPEED_DEVICE": options.device, **chosen}
    with subprocess.Popen(
        launch.argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as job:  # fmt: skip
        try:
            said, _ = job.communicate(timeout=options.limit)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGKILL)  # the ranks too, which would go on beside the next job
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said = f"{job.communicate()[0]}\nended after {options.limit:.0f} s, its limit"
    row: dict[str, Any] = {"side": side.name, "ranks": side.ranks, "path": path}
    records = [line.partition("RECORD ")[2] for line in said.splitlines() if "RECORD " in line]
    if job.returncode or not records:
        return row | {"failed": said[-2000:]}
    return row | json.loads(records[0])


def compare(row: dict[str, Any], side: Side, measured: dict[str, dict[str, Any]]) -> None:
    """Add to `row` what it is beside the side it is measured against."""
    base = measured.get(side.against, {})
    if "step_seconds" not in base or "step_seconds" not in row:
        return
    row["times_one_process"] = row["step_seconds"] / base["step_seconds"]
    if side.target is not None:
        row |= {"target": side.target, "is_reached": row["times_one_process"] <= side.target}
    if side.stages == 1:  # layers of a pipeline draw weights of their own
        pairs = zip(row["losses"], base["losses"], strict=True)
        row["loss_difference"] = max(abs(ours - theirs) / theirs for ours, theirs in pairs)


def shown(row: dict[str, Any]) -> str:
    """A line."""
    name = f"{row['side']}{', ' * bool(row['path'])}{row['path']}"
    if "failed" in row:
        return f"{name:30} failed:\n{row['failed']}"
    line = f"{name:30} {1e3 * row['step_seconds']:8.2f} ms, loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"
    if row["way"] not in ("", row["path"]):
        line += f", really {row['way']}"
    if "times_one_process" in row:
        line += f", {row['times_one_process']:.2f} of one process"
    if "target" in row:
        line += f" (target {row['target']}: {'reached' if row['is_reached'] else 'missed'})"
    if "loss_difference" in row:
        line += f", losses off by {row['loss_difference']:.1e}"
    return line


def main() -> None:
    """Run all sides, print, record; exit code 1 if one failed or its losses are others."""
    parser = parser_of(__doc__)
    parser.set_defaults(rounds=6)
    parser.add_argument("--device", default="cuda:0", help="value of MPISPEED_DEVICE (default %(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one job (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=[side.name for side in SIDES], help="these sides")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        as_rank(next(side for side in SIDES if side.name == options.as_rank), options.rounds, options.small)
        return
    is_gpu = options.device.startswith("cuda")
    if is_gpu:
        need_gpu()
    measured: dict[str, dict[str, Any]] = {}
    rows = []
    for side in SIDES:
        if options.only and side.name not in options.only:
            continue
        for path in PATHS if side.ranks > 1 else ("",):
            row = run(side, path, options)
            compare(row, side, measured)
            measured.setdefault(side.name, row)
            print(shown(row), flush=True)
            rows.append(row)
    if is_gpu:
        print(write_results("shared", rows, options=vars(options), path=options.json))
    if any("failed" in row or row.get("loss_difference", 0.0) > LOSSES for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
