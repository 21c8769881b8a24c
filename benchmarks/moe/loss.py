"""What experts give in quality: validation loss of the example GPT along a run, with experts and without.

    python benchmarks/moe/loss.py --json benchmarks/results/moe-loss.json --picture docs/moe-loss.png

A token meets as many weights of perceptrons in both models: in every other block the perceptron is replaced by eight of
half its width, of which a router chooses two (`docs/examples/gpt_experts.py`). Beyond that the experts have the router
and a second output bias. Data, their order, batch, optimizer and schedule are those of `docs/examples/train_gpt.py`,
which were chosen for the model without experts; one rank, one thread. Losses of validation are cross entropy alone.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import mpispeed

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gpt_job
import loss_runs
import peers
from gpt import GPT, Shape
from gpt_experts import Mixture

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
    training, held_out = loss_runs.begin(options.seed, SHAPE.block)
    settings = gpt_job.example_settings(options.steps)
    model = MODELS[options.model](SHAPE)
    engine, *_ = mpispeed.initialize(model=model, training_data=training, config=settings)
    loss_runs.train(engine, options, held_out)


def compare(results: loss_runs.Results) -> None:
    """Add the final losses and the change against the dense model, and print them."""
    for name, losses in loss_runs.add_finals(results, "dense").items():
        found = results[name]
        line = f"{name:10s} {found['parameters']:,} parameters, {found['active_parameters']:,} active; {losses}"
        if "change_percent" in found:
            line += f"   {found['change_percent']:+.2f} % against dense"
        print(line, flush=True)


def label(name: str, found: Mapping[str, Any]) -> str:
    """Of a model's curves."""
    return f"{name}: {found['active_parameters'] / 1e6:.2f} of {found['parameters'] / 1e6:.2f} M active"


def main() -> None:
    """Run both models one after the other, for each seed; or be one of the jobs."""
    options = loss_runs.parser_of(__doc__, MODELS).parse_args()
    if options.model:
        train(options)
        return
    kept = {key: getattr(options, key) for key in ("steps", "eval_every")}
    write = functools.partial(peers.write_record, options.json, "moe/loss", kept)
    facts = {name: count(made(SHAPE)) for name, made in MODELS.items()}
    results = loss_runs.kept_results(options.json, kept, facts)
    loss_runs.add_runs(results, __file__, MODELS, options, write)
    compare(results)
    write(results)
    if options.picture:
        loss_runs.draw(options.picture, results, COLOURS, "A byte-level GPT, a line a seed", label)


if __name__ == "__main__":
    main()
