"""What Muon gives in quality: validation loss of the example GPT along a run, beside AdamW, each at its tuned rate.

    python benchmarks/step/muon_loss.py --json benchmarks/results/muon-loss.json --picture docs/muon-loss.png

Every run is a job of `docs/examples/train_gpt.py` with the example's data, batch, decay, clipping and schedule, on one
rank and one thread; runs differ in the optimizer and its rate only. The first seed tunes: each optimizer runs at all
its rates (`is_between`: the best is not at an end of them). The other seeds run at the best rates.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpt_job
import peers

from mpispeed.base.plotting import picture

ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}  # of the example
RATES = {"AdamW": (2.5e-3, 5e-3, 1e-2, 2e-2), "Muon": (1e-2, 4e-2, 8e-2)}
OTHERS = 5e-3  # of vectors, the embedding and the head beside Muon: the example's rate
COLOURS = {"AdamW": "#444444", "Muon": "#0072b2"}


def optimizer_of(name: str, rate: float) -> dict[str, Any]:
    """The section of the settings."""
    rates = {"lr": rate} if name == "AdamW" else {"muon_lr": rate, "adam_lr": OTHERS}
    return {"type": name, "params": {**ADAM, **rates}}


def train(name: str, rate: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses along one job."""
    settings = gpt_job.example_settings(options.steps)
    settings["optimizer"] = optimizer_of(name, rate)
    with tempfile.TemporaryDirectory() as place:
        job = ("--eval_every", str(options.eval_every), "--seed", str(seed))
        rows = gpt_job.train(settings, 1, options.steps, Path(place), *job, OMP_NUM_THREADS="1")
    return {"seed": seed, "rate": rate, **gpt_job.curves(rows, "train_loss", "validation_loss")}


def final(run: Mapping[str, Any]) -> float:
    """Validation loss at the end of a run."""
    return float(run["validation_loss"][-1])


def best_rate(runs: list[dict[str, Any]], seed: int) -> float:
    """The rate of the best run of a seed."""
    return float(min((run for run in runs if run["seed"] == seed), key=final)["rate"])


def has_run(runs: list[dict[str, Any]], seed: int, rate: float) -> bool:
    """True if a run of this seed and rate is there."""
    return any((run["seed"], run["rate"]) == (seed, rate) for run in runs)


def compare(results: dict[str, dict[str, Any]], seeds: list[int]) -> None:
    """Add the tuned rate, the mean final loss at it and the change against AdamW, and print them."""
    for name, found in results.items():
        rate = found["tuned_rate"] = best_rate(found["runs"], seeds[0])
        own = [run for run in found["runs"] if run["rate"] == rate and run["seed"] in seeds]
        found["final"] = statistics.mean(map(final, own))
        found["is_between"] = min(RATES[name]) < rate < max(RATES[name])
        change = 100 * (found["final"] / results["AdamW"]["final"] - 1)
        found["change_percent"] = round(change, 3)
        of_seeds = ", ".join(f"{final(run):.4f} (seed {run['seed']})" for run in own)
        print(f"{name:6s} rate {rate:g}  {found['final']:.4f}: {of_seeds}   {change:+.2f} % against AdamW", flush=True)


def draw(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """The validation losses at the tuned rates after the first point."""
    with picture(path, 6.0, 3.8, layout="constrained") as figure:
        axes = figure.subplots()
        for name, found in results.items():
            own = [run for run in found["runs"] if run["rate"] == found["tuned_rate"]]
            for number, run in enumerate(own):
                label = None if number else f"{name}, rate {found['tuned_rate']:g}"
                axes.plot(run["step"][1:], run["validation_loss"][1:], color=COLOURS[name], label=label)
        axes.set(xlabel="step", ylabel="validation loss (nats per byte)", title="A byte-level GPT, a line a seed")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def main() -> None:
    """Tune with the first seed, run the others, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval_every", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1])
    parser.add_argument("--json", type=Path, help="write the figures here; runs that it holds already stay")
    parser.add_argument("--picture", type=Path, help="draw the curves here")
    options = parser.parse_args()
    kept = {key: getattr(options, key) for key in ("steps", "eval_every")}
    held = peers.read_results(options.json, kept)
    results: dict[str, dict[str, Any]] = {name: {"runs": held.get(name, {}).get("runs", [])} for name in RATES}
    for seed in options.seeds:
        for place in range(max(map(len, RATES.values()))):
            for name, found in results.items():
                is_first = seed == options.seeds[0]
                rates = RATES[name] if is_first else (best_rate(found["runs"], options.seeds[0]),)
                if place >= len(rates) or has_run(found["runs"], seed, rates[place]):
                    continue
                found["runs"].append(train(name, rates[place], seed, options))
                print(f"{name:6s} rate {rates[place]:g} seed {seed}: {final(found['runs'][-1]):.4f}", flush=True)
                peers.write_record(options.json, "step/muon_loss", kept, results)
    compare(results, options.seeds)
    peers.write_record(options.json, "step/muon_loss", kept, results)
    if options.picture:
        draw(options.picture, results)


if __name__ == "__main__":
    main()
