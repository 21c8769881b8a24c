"""What a run saves by computing less of the model, and what it loses: random-LTD and progressive layer drop.

    python benchmarks/data_efficiency/loss.py --json benchmarks/results/data-efficiency-loss.json \
        --picture docs/data-efficiency-loss.png

The GPT of `docs/examples`, with more and narrower layers than there, so that a layer is a small part of it. Data, their
order, batch, optimizer and schedule are those of `docs/examples/train_gpt.py`, which were chosen for all layers and all
tokens; one rank, one thread. A batch is accumulated of micro-batches, each of which leaves out layers of its own. The
part saved is that of the blocks' layer tokens; seconds are processor time of training steps. Validation computes
everything.

`pld` has the paper's theta and gamma, 0.5 and 100 / steps; `pld-slow` reaches theta later.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

import mpispeed
from mpispeed.base.plotting import picture
from mpispeed.monitor import Event
from mpispeed.nn.layer_drop import convert_to_layer_drop
from mpispeed.nn.routing import convert_to_random_ltd

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gpt_job
import peers
import train_gpt
from gpt import GPT, Block, Shape
from text import Windows, standard_library

STEPS = 800  # of the example's schedule
ACCUMULATION = 8  # micro-batches of a batch
SHAPE = Shape(layers=12, heads=4, width=64, block=64)
ROUTED = [6, 7, 8, 9, 10]  # layers of random-LTD
FIRST_LENGTH, LENGTH_STEP = 8, 64  # tokens that it keeps at first, and all at once when they are all of a sample
ROUTED_PART = 0.9125  # of the steps, after which it keeps all
MODELS = ("baseline", "random-ltd", "pld", "pld-slow")
COLOURS = {"baseline": "#444444", "random-ltd": "#0072b2", "pld": "#d55e00", "pld-slow": "#e69f00"}


def settings_of(name: str, steps: int) -> dict[str, Any]:
    """The section of the config that a run has beside those of the example."""
    if name == "random-ltd":
        schedule = {"require_steps": int(ROUTED_PART * steps), "seq_per_step": LENGTH_STEP}
        routing = {
            "enabled": True, "total_layer_num": SHAPE.layers, "random_ltd_layer_num": len(ROUTED),
            "random_ltd_layer_id": ROUTED, "model_type": "decoder", "hidden_state_order": "batch_seq_dim",
            "token_inputs": ["rotation"],
            "random_ltd_schedule": {
                "min_value": FIRST_LENGTH, "max_value": SHAPE.block, "schedule_type": "fixed_linear",
                "schedule_config": schedule,
            },
        }  # fmt: skip
        return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": routing}}}
    if name.startswith("pld"):
        gamma = (100 if name == "pld" else 9) / steps
        return {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": gamma}}
    return {}


class Costs:
    """Processor time of training steps, and the layer tokens of the blocks that were computed."""

    def __init__(self, engine: mpispeed.Engine) -> None:
        self.seconds, self.computed, self.whole = 0.0, 0, 0
        self._began: float | None = None
        self._is_counting = False
        engine.bus.subscribe(Event.BATCH_START, self._begin)
        engine.bus.subscribe(Event.STEP_END, self._end)
        for block in engine.module.modules():
            if isinstance(block, Block):
                block.register_forward_hook(self._count)

    def _begin(self, event: Mapping[str, Any]) -> None:
        self._is_counting = event["is_training"]
        if self._is_counting:
            self.whole += SHAPE.layers
            self._began = time.process_time() if self._began is None else self._began

    def _count(self, block: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._is_counting:
            self.computed += inputs[0].shape[1]

    def _end(self, _: Mapping[str, Any]) -> None:
        self.seconds += time.process_time() - (self._began or 0.0)
        self._began = None


def train(options: argparse.Namespace) -> None:
    """Be a job: train one model; its losses go to loss.csv, what it cost to costs.json."""
    mpispeed.init_distributed()
    text, held_out_text = standard_library()
    held_out = Windows(held_out_text, SHAPE.block)
    torch.manual_seed(options.seed)
    settings = gpt_job.example_settings() | settings_of(options.model, options.steps)
    settings["scheduler"]["params"]["total_num_steps"] = options.steps
    settings["gradient_accumulation_steps"] = ACCUMULATION
    model = GPT(SHAPE)
    if options.model.startswith("pld"):
        convert_to_layer_drop(model, Block)
    engine, *_ = mpispeed.initialize(model=model, training_data=Windows(text, SHAPE.block), config=settings)
    if options.model == "random-ltd":
        convert_to_random_ltd(engine, Block)
    costs = Costs(engine)
    stride = max(1, len(held_out) // train_gpt.VALIDATION_WINDOWS)
    own = range(0, len(held_out), stride)[: train_gpt.VALIDATION_WINDOWS]
    options.resume = options.save_every = 0
    train_gpt.train(engine, options, DataLoader(Subset(held_out, own), batch_size=24))
    told = {"saved_part": 1 - costs.computed / (costs.whole * SHAPE.block), "cpu_seconds": costs.seconds}
    (options.out / "costs.json").write_text(json.dumps(told), encoding="utf-8")


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses along one job, and what it cost."""
    with tempfile.TemporaryDirectory() as place:
        words = ["--model", name, "--seed", str(seed), "--out", place]
        words += ["--steps", str(options.steps), "--eval_every", str(options.eval_every)]
        start = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", "1", __file__, *words]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = gpt_job.read_csv(Path(place) / "loss.csv")
        costs = json.loads((Path(place) / "costs.json").read_text(encoding="utf-8"))
    return {
        "seed": seed,
        **costs,
        "step": [int(row["step"]) for row in rows],
        "train_loss": [float(row["train_loss"]) for row in rows],
        "validation_loss": [float(row["validation_loss"]) for row in rows],
    }


def measured(path: Path | None, kept: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs that a record of the same options holds already."""
    record = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    runs = {name: found["runs"] for name, found in record["results"].items()} if record.get("options") == kept else {}
    return {name: {"runs": runs.get(name, [])} for name in MODELS}


def compare(results: Mapping[str, dict[str, Any]]) -> None:
    """Add the final losses, what was saved and the change against the baseline, and print them."""
    for name, found in results.items():
        runs = found["runs"]
        if not runs:
            continue
        found["final"] = statistics.mean(each["validation_loss"][-1] for each in runs)
        for key in ("saved_part", "cpu_seconds"):
            found[key] = statistics.mean(each[key] for each in runs)
        line = f"{name:10s} validation loss {found['final']:.4f}: "
        line += ", ".join(f"{each['validation_loss'][-1]:.4f} (seed {each['seed']})" for each in runs)
        line += f"; {found['saved_part']:.1%} of layer tokens saved; {found['cpu_seconds']:.0f} s"
        base = results["baseline"]
        if name != "baseline" and "final" in base:
            found["change_percent"] = 100 * (found["final"] / base["final"] - 1)
            found["saved_seconds_percent"] = 100 * (1 - found["cpu_seconds"] / base["cpu_seconds"])
            line += f"   loss {found['change_percent']:+.2f} %, time {-found['saved_seconds_percent']:+.1f} %"
        print(line, flush=True)


def draw(path: Path, results: Mapping[str, dict[str, Any]]) -> None:
    """The losses of all runs."""
    with picture(path, 6.0, 3.8, layout="constrained") as figure:
        axes = figure.subplots()
        for name, found in results.items():
            for number, each in enumerate(found["runs"]):
                label = name if name == "baseline" else f"{name}: {found['saved_part']:.0%} of layer tokens saved"
                style = {"color": COLOURS[name], "linewidth": 1.2, "linestyle": ("-", "--", ":")[number % 3]}
                axes.plot(each["step"][1:], each["validation_loss"][1:], label=None if number else label, **style)
        title = f"A byte-level GPT of {SHAPE.layers} layers, a line a seed"
        axes.set(xlabel="step", ylabel="validation loss (nats per byte)", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def main() -> None:
    """Run all models one after the other, for each seed; or be one of the jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eval_every", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
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
    kept["shape"] = f"{SHAPE.layers} layers, {SHAPE.width} wide"
    results = measured(options.json, kept)
    for seed in options.seeds:
        for name in options.models:
            if any(each["seed"] == seed for each in results[name]["runs"]):
                continue
            results[name]["runs"].append(run(name, seed, options))
            last = results[name]["runs"][-1]
            print(f"{name:10s} seed {seed} validation loss {last['validation_loss'][-1]:.4f}", flush=True)
            peers.write_record(options.json, "data_efficiency/loss", kept, results)
    compare(results)
    peers.write_record(options.json, "data_efficiency/loss", kept, results)
    if options.picture:
        draw(options.picture, results)


if __name__ == "__main__":
    main()
