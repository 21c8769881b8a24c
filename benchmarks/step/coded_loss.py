"""What coded messages cost in quality: validation loss of the example GPT after some steps, beside plain stage 3.

    python benchmarks/step/coded_loss.py -n 4 --steps 200 --json benchmarks/results/coded-loss.json

Every variant is a job of `docs/examples/train_gpt.py` from the same weights on the same data. Short runs scatter, so
several seeds of weights are compared and their mean counts. Two ranks count as a node (MPISPEED_RANKS_PER_NODE), so
that sums between nodes exist. The persistence threshold is 0, so that everything is cut.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import gpt_job
import peers

RANKS_PER_NODE = 2
CUT = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_quantized_in_node": True}
LOCO = {"err_beta": 0.8, "reset_T": 1024}
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "qgZ, LoCo": {"zero_quantized_gradients": True, "zeropp_loco_param": LOCO},
    "qwZ, hpZ, qgZ": {
        "zero_quantized_weights": True, "zero_hpz_partition_size": RANKS_PER_NODE, "zero_quantized_gradients": True,
    },
}  # fmt: skip


def train(section: dict[str, Any], ranks: int, steps: int, seed: int, folder: Path) -> float:
    """Validation loss after one job."""
    settings = gpt_job.example_settings(steps)
    settings["zero_optimization"] = {**CUT, **section}
    options = ("--seed", str(seed), "--eval_every", str(steps))
    rows = gpt_job.train(settings, ranks, steps, folder, *options, MPISPEED_RANKS_PER_NODE=str(RANKS_PER_NODE))
    return float(rows[-1]["validation_loss"])


def main() -> None:
    """Run the variants one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="repetitions from other weights")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    names = ["stage 3", *(name for name in options.only if name != "stage 3")]
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(options.seeds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                losses[name].append(train(VARIANTS[name], options.ranks, options.steps, seed, Path(folder)))
            change = 100 * (losses[name][-1] / losses["stage 3"][-1] - 1)
            print(f"seed {seed}  {name:14s} validation loss {losses[name][-1]:.4f}   {change:+.2f} %", flush=True)
    plain = statistics.mean(losses["stage 3"])
    for name in names:
        mean = statistics.mean(losses[name])
        print(f"mean    {name:14s} validation loss {mean:.4f}   {100 * (mean / plain - 1):+.2f} %", flush=True)
    peers.write_record(
        options.json, "coded_loss", {"ranks": options.ranks, "steps": options.steps, "seeds": options.seeds}, losses
    )


if __name__ == "__main__":
    main()
