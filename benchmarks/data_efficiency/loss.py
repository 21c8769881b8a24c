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
import functools
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import mpispeed
from mpispeed.monitor import Event
from mpispeed.nn.layer_drop import convert_to_layer_drop
from mpispeed.nn.routing import convert_to_random_ltd

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gpt_job
import loss_runs
import peers
from gpt import GPT, Block, Shape

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
    """Be a job: train one model; its losses go to loss.csv, what it cost beside them."""
    training, held_out = loss_runs.begin(options.seed, SHAPE.block)
    settings = gpt_job.example_settings(options.steps) | settings_of(options.model, options.steps)
    settings["gradient_accumulation_steps"] = ACCUMULATION
    model = GPT(SHAPE)
    if options.model.startswith("pld"):
        convert_to_layer_drop(model, Block)
    engine, *_ = mpispeed.initialize(model=model, training_data=training, config=settings)
    if options.model == "random-ltd":
        convert_to_random_ltd(engine, Block)
    costs = Costs(engine)
    loss_runs.train(engine, options, held_out)
    saved_part = 1 - costs.computed / (costs.whole * SHAPE.block)
    loss_runs.write_facts(options, {"saved_part": saved_part, "cpu_seconds": costs.seconds})


def compare(results: loss_runs.Results) -> None:
    """Add the final losses, what was saved and the change against the baseline, and print them."""
    base = results["baseline"]
    for name, losses in loss_runs.add_finals(results, "baseline").items():
        found = results[name]
        for key in ("saved_part", "cpu_seconds"):
            found[key] = statistics.mean(each[key] for each in found["runs"])
        line = f"{name:10s} {losses}; {found['saved_part']:.1%} of layer tokens saved; {found['cpu_seconds']:.0f} s"
        if "change_percent" in found:
            found["saved_seconds_percent"] = 100 * (1 - found["cpu_seconds"] / base["cpu_seconds"])
            line += f"   loss {found['change_percent']:+.2f} %, time {-found['saved_seconds_percent']:+.1f} %"
        print(line, flush=True)


def label(name: str, found: Mapping[str, Any]) -> str:
    """Of a model's curves."""
    return name if name == "baseline" else f"{name}: {found['saved_part']:.0%} of layer tokens saved"


def main() -> None:
    """Run all models one after the other, for each seed; or be one of the jobs."""
    parser = loss_runs.parser_of(__doc__, MODELS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    if options.model:
        train(options)
        return
    kept = {key: getattr(options, key) for key in ("steps", "eval_every")}
    kept["shape"] = f"{SHAPE.layers} layers, {SHAPE.width} wide"
    write = functools.partial(peers.write_record, options.json, "data_efficiency/loss", kept)
    results = loss_runs.kept_results(options.json, kept, {name: {} for name in MODELS})
    loss_runs.add_runs(results, __file__, options.models, options, write)
    compare(results)
    write(results)
    if options.picture:
        title = f"A byte-level GPT of {SHAPE.layers} layers, a line a seed"
        loss_runs.draw(options.picture, results, COLOURS, title, label)


if __name__ == "__main__":
    main()
