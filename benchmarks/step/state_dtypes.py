"""Losses of a small GPT with states of the optimizer and masters in few bits, beside those of fp32.

    python benchmarks/step/state_dtypes.py --json benchmarks/results/state-dtypes.json

One process and one thread. A seed gives the weights and the order of batches, and every setting sees the same. Losses
are computed in fp32 of the model's logits, and the rate falls to zero, so that they scatter little: the mean over the
last 100 steps, and that of files held out. Bytes are those that the engine holds, for each element of its flat buffers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import peers
import torch
from torch.nn import functional as F

import mpispeed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "examples"))

from gpt import GPT, Shape  # noqa: E402
from text import Windows, standard_library  # noqa: E402

BATCH, LAST, HELD = 8, 100, 512
WARM = {"warmup_num_steps": 50, "warmup_max_lr": 2e-3}
SHAPE = Shape(layers=2, heads=4, width=64, block=64)
KAHAN, RANDOM = ({"master_dtype": "bf16", "master_rounding": rounding} for rounding in ("kahan", "stochastic"))
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, moments int8": {"optimizer_states": "int8"},
    "fp32, moments bf16": {"optimizer_states": "bf16"},
    "bf16": {"bf16": True},
    "bf16, moments int8": {"bf16": True, "optimizer_states": "int8"},
    "bf16 masters kahan, moments int8": {"bf16": True, **KAHAN, "optimizer_states": "int8"},
    "bf16 masters stochastic, moments int8": {"bf16": True, **RANDOM, "optimizer_states": "int8"},
}
"""By name, `data_types` and whether the model is bf16."""


def train(name: str, steps: int, seed: int, windows: Windows, held: Windows) -> dict[str, float]:
    """One run: its losses, the bytes of its states for each element, and the time of its updates."""
    types = dict(SETTINGS[name])
    config = {
        "train_batch_size": BATCH,
        "bf16": {"enabled": types.pop("bf16", False)},
        "data_types": types,
        "seed": seed,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": WARM | {"total_num_steps": steps}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
    }
    torch.manual_seed(seed)
    engine, *_ = mpispeed.initialize(model=GPT(SHAPE), config=config)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    losses, updates = [], []
    for step in range(steps):
        x, y = _batch(windows, order[step * BATCH :][:BATCH])
        loss = F.cross_entropy(engine(x).float().flatten(0, 1), y.flatten())
        engine.backward(loss)
        losses.append(float(loss.detach()))
        start = time.perf_counter()
        engine.step()
        updates.append(time.perf_counter() - start)
    engine.eval()
    with torch.no_grad():
        x, y = _batch(held, torch.arange(HELD))
        validation = float(F.cross_entropy(engine(x).float().flatten(0, 1), y.flatten()))
    shards, states = engine.mpispeed.parts.params.shards, engine.mpispeed.parts.optimization.states
    elements = sum(unit.layout.padded for unit in engine.mpispeed.parts.table.units)
    row = {
        "training": statistics.fmean(losses[-LAST:]),
        "validation": validation,
        "parameter bytes": shards.param_bytes / elements,
        "master bytes": shards.master_bytes / elements,
        "moment bytes": states.state_bytes / elements,
        "update ms": 1e3 * statistics.median(updates),
    }
    engine.destroy()
    return row


def _batch(windows: Windows, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = map(torch.stack, zip(*(windows[int(i)] for i in indices), strict=True))
    return x, y


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """By setting, means over the seeds of its losses divided by full precision's of the same seed, minus 1."""
    found: dict[str, dict[str, Any]] = {}
    for name, rows in runs.items():
        base = {row["seed"]: row for row in runs["bf16" if name.startswith("bf16") else "fp32"]}
        above = {
            f"{kind} above": statistics.fmean(row[kind] / base[row["seed"]][kind] - 1 for row in rows)
            for kind in ("training", "validation")
        }
        found[name] = {"seeds": len(rows), **above, "runs": rows}
    return found


def main() -> None:
    """Run the settings with all seeds; the record is written after every seed, beside what it has of others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path, help="add the figures to this record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    windows, held = (Windows(text, SHAPE.block) for text in standard_library(2_000_000))
    known = json.loads(args.json.read_text())["results"] if args.json is not None and args.json.is_file() else {}
    runs: dict[str, list[dict[str, float]]] = {name: list(known.get(name, {"runs": []})["runs"]) for name in SETTINGS}
    for seed in args.seeds:
        for name in args.only:
            begin = time.perf_counter()
            row = {"seed": seed, **train(name, args.steps, seed, windows, held)}
            runs[name] = [*(one for one in runs[name] if one["seed"] != seed), row]
            text = f"training {row['training']:.4f} validation {row['validation']:.4f}"
            print(f"seed {seed}  {name:38s} {text}  {time.perf_counter() - begin:.0f} s", flush=True)
        options = {"steps": args.steps, "batch": BATCH, "last": LAST}
        peers.write_record(args.json, "state_dtypes", options, summary({k: v for k, v in runs.items() if v}))
    for name, row in summary({name: rows for name, rows in runs.items() if rows}).items():
        above = "  ".join(f"{kind} {100 * row[f'{kind} above']:+.2f} %" for kind in ("training", "validation"))
        print(f"{name:38s} {row['seeds']} seeds  {above}", flush=True)


if __name__ == "__main__":
    main()
