"""Training loss of a small GPT with states of the optimizer and masters in few bits, beside fp32.

    python benchmarks/step/state_dtypes.py --steps 800 --out benchmarks/results/state-dtypes.json

One process and one thread; every setting sees the same batches and starts from the same weights. The loss is the mean
over held-out windows. Bytes are those that the engine holds, for each element of its flat buffers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import mpispeed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "examples"))

from gpt import GPT, Shape  # noqa: E402
from text import Windows, standard_library  # noqa: E402

BATCH = 16
KAHAN, RANDOM = ({"master_dtype": "bf16", "master_rounding": rounding} for rounding in ("kahan", "stochastic"))
SETTINGS = {
    "fp32": {},
    "fp32, moments int8": {"optimizer_states": "int8"},
    "fp32, moments bf16": {"optimizer_states": "bf16"},
    "bf16": {"bf16": True},
    "bf16, moments int8": {"bf16": True, "optimizer_states": "int8"},
    "bf16 masters, nearest": {"bf16": True, "master_dtype": "bf16"},
    "bf16 masters, stochastic": {"bf16": True, **RANDOM},
    "bf16 masters, kahan": {"bf16": True, **KAHAN},
    "bf16 masters, kahan, moments int8": {"bf16": True, **KAHAN, "optimizer_states": "int8"},
}
"""By name, `data_types` and whether the model is bf16."""


def train(name: str, steps: int, windows: Windows) -> dict[str, float | str]:
    """One run: its loss, and the bytes of its states for each element."""
    types = dict(SETTINGS[name])
    config = {
        "train_batch_size": BATCH,
        "bf16": {"enabled": types.pop("bf16", False)},
        "data_types": types,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 2e-3}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
    }
    torch.manual_seed(7)
    engine, *_ = mpispeed.initialize(model=GPT(Shape(layers=2, heads=4, width=96, block=64)), config=config)
    order = torch.randperm(len(windows) - 256, generator=torch.Generator().manual_seed(3))
    begin, updates = time.perf_counter(), []
    for step in range(steps):
        x, y = map(torch.stack, zip(*(windows[int(i)] for i in order[step * BATCH :][:BATCH]), strict=True))
        engine.backward(engine(x, y))
        start = time.perf_counter()
        engine.step()
        updates.append(time.perf_counter() - start)
    seconds = time.perf_counter() - begin
    engine.eval()
    with torch.no_grad():
        held = [windows[i] for i in range(len(windows) - 256, len(windows))]
        x, y = map(torch.stack, zip(*held, strict=True))
        loss = float(engine(x, y))
    shards, states = engine.mpispeed.parts.params.shards, engine.mpispeed.parts.optimization.states
    elements = sum(unit.layout.padded for unit in engine.mpispeed.parts.table.units)
    row = {
        "setting": name,
        "loss": loss,
        "parameter bytes": shards.param_bytes / elements,
        "master bytes": shards.master_bytes / elements,
        "moment bytes": states.state_bytes / elements,
        "step ms (median)": 1e3 * statistics.median(updates),
        "seconds": seconds,
    }
    engine.destroy()
    return row


def main() -> None:
    """Run all settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    windows, rows = Windows(standard_library(2_000_000)[0], 64), []
    for name in SETTINGS:
        rows.append(train(name, args.steps, windows))
        print(json.dumps(rows[-1]), flush=True)
    base = {False: rows[0]["loss"], True: next(row["loss"] for row in rows if row["setting"] == "bf16")}
    for row in rows:
        row["above full precision"] = row["loss"] / base[row["setting"].startswith("bf16")] - 1
        print(f"{row['setting']:36} {row['loss']:.4f} {100 * row['above full precision']:+.2f} %")
    if args.out is not None:
        args.out.write_text(
            json.dumps({"steps": args.steps, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
