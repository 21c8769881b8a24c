"""What experts give in quality: validation loss of the example GPT along a run, with experts and without.

    python benchmarks/moe/loss.py --json benchmarks/results/moe-loss.json --picture docs/moe-loss.png

A token meets as many weights of perceptrons in both models: in every other block the perceptron is replaced by eight of
half its width, of which a router chooses two (`docs/examples/gpt_experts.py`). Beyond that the experts have the router
and a second output bias. Data, their order, batch, optimizer and schedule are those of `docs/examples/train_gpt.py`,
which were chosen for the model without experts; one rank, one thread. Losses of validation are cross entropy alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

import mpispeed
from mpispeed.base.plotting import picture

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gpt_job
import peers
import train_gpt
from gpt import GPT, Shape
from gpt_experts import Mixture
from text import Windows, standard_library

STEPS = 800  # of the example's schedule
SHAPE = Shape(layers=4, heads=4, width=128, block=128)
MODELS: Mapping[str, type[GPT]] = {"dense": GPT, "experts": Mixture}
COLOURS = {"dense": "#444444", "experts": "#0072b2"}


def count(model: torch.nn.Module) -> dict[str, int]:
    """Parameters of a model, and those that a token meets."""
    everything = sum(param.numel() for param in model.parameters())
    idle = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name) * 6 // 8
    return {"parameters": everything, "active_parameters": everything - idle}


def train(options: argparse.Namespace) -> None:
    """Be a job: train one model; its losses go to loss.csv."""
    mpispeed.init_distributed()
    text, held_out_text = standard_library()
    held_out = Windows(held_out_text, SHAPE.block)
    torch.manual_seed(options.seed)
    settings = gpt_job.example_settings()
    settings["scheduler"]["params"]["total_num_steps"] = options.steps
    model = MODELS[options.model](SHAPE)
    engine, *_ = mpispeed.initialize(model=model, training_data=Windows(text, SHAPE.block), config=settings)
    stride = max(1, len(held_out) // train_gpt.VALIDATION_WINDOWS)
    own = range(0, len(held_out), stride)[: train_gpt.VALIDATION_WINDOWS]
    options.resume = options.save_every = 0
    train_gpt.train(engine, options, DataLoader(Subset(held_out, own), batch_size=24))


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses along one job."""
    with tempfile.TemporaryDirectory() as place:
        words = ["--model", name, "--seed", str(seed), "--out", place]
        words += ["--steps", str(options.steps), "--eval_every", str(options.eval_every)]
        start = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", "1", __file__, *words]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = gpt_job.read_csv(Path(place) / "loss.csv")
    return {
        "seed": seed,
        "step": [int(row["step"]) for row in rows],
        "train_loss": [float(row["train_loss"]) for row in rows],
        "validation_loss": [float(row["validation_loss"]) for row in rows],
    }


def measured(path: Path | None, kept: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs that a record of the same options holds already."""
    record = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    runs = {name: found["runs"] for name, found in record["results"].items()} if record.get("options") == kept else {}
    return {name: {**count(made(SHAPE)), "runs": runs.get(name, [])} for name, made in MODELS.items()}


def compare(results: Mapping[str, dict[str, Any]]) -> None:
    """Add the final losses and the change against the dense model, and print them."""
    for name, found in results.items():
        found["final"] = statistics.mean(each["validation_loss"][-1] for each in found["runs"])
        line = f"{name:8s} {found['parameters']:,} parameters, {found['active_parameters']:,} active; "
        line += f"validation loss {found['final']:.4f}: "
        line += ", ".join(f"{each['validation_loss'][-1]:.4f} (seed {each['seed']})" for each in found["runs"])
        if name != "dense" and "dense" in results:
            found["change_percent"] = 100 * (found["final"] / results["dense"]["final"] - 1)
            line += f"   {found['change_percent']:+.2f} % against dense"
        print(line, flush=True)


def draw(path: Path, results: Mapping[str, dict[str, Any]]) -> None:
    """The losses of all runs."""
    with picture(path, 6.0, 3.8, layout="constrained") as figure:
        axes = figure.subplots()
        for name, found in results.items():
            for number, each in enumerate(found["runs"]):
                label = f"{name}: {found['active_parameters'] / 1e6:.2f} of {found['parameters'] / 1e6:.2f} M active"
                style = {"color": COLOURS[name], "linewidth": 1.2, "linestyle": ("-", "--", ":")[number % 3]}
                axes.plot(each["step"][1:], each["validation_loss"][1:], label=None if number else label, **style)
        axes.set(xlabel="step", ylabel="validation loss (nats per byte)", title="A byte-level GPT, a line a seed")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def main() -> None:
    """Run both models one after the other, for each seed; or be one of the jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eval_every", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1])
    parser.add_argument("--json", type=Path, help="write the figures here; runs that it holds already stay")
    parser.add_argument("--picture", type=Path, help="draw the curves here")
    parser.add_argument("--model", choices=MODELS, help="used for the jobs")
    parser.add_argument("--seed", type=int, help="used for the jobs")
    parser.add_argument("--out", type=Path, help="used for the jobs")
    options = parser.parse_args()
    if options.model:
        train(options)
        return
    kept = {key: getattr(options, key) for key in ("steps", "eval_every")}
    results = measured(options.json, kept)
    for seed in options.seeds:
        for name, found in results.items():
            if any(each["seed"] == seed for each in found["runs"]):
                continue
            found["runs"].append(run(name, seed, options))
            print(f"{name:8s} seed {seed} validation loss {found['runs'][-1]['validation_loss'][-1]:.4f}", flush=True)
            peers.write_record(options.json, "moe/loss", kept, results)
    compare(results)
    peers.write_record(options.json, "moe/loss", kept, results)
    if options.picture:
        draw(options.picture, results)


if __name__ == "__main__":
    main()
