"""Losses of several models along runs of the example GPT's loop: a job for each model and seed, kept, compared, drawn.

A benchmark's script starts itself with `--model` as the job of one model. `results` map the name of a model to what is
known of it, its runs among that; a run has the seed, facts of its own, and the losses at every validation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import gpt_job
import peers
import torch
from torch.utils.data import DataLoader, Subset

import mpispeed
from mpispeed.base.plotting import picture

sys.path.insert(0, str(gpt_job.EXAMPLE))
import train_gpt
from text import Windows, standard_library

STEPS = 800  # of the example's schedule

Results = dict[str, dict[str, Any]]


def parser_of(doc: str, models: Collection[str]) -> argparse.ArgumentParser:
    """A parser with what all scripts take, and with what they give to their jobs."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--eval_every", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1])
    parser.add_argument("--json", type=Path, help="write the figures here; runs that it holds already stay")
    parser.add_argument("--picture", type=Path, help="draw the curves here")
    parser.add_argument("--model", choices=models, help="used for the jobs")
    parser.add_argument("--seed", type=int, help="used for the jobs")
    parser.add_argument("--out", type=Path, help="used for the jobs")
    return parser


def begin(seed: int, block: int) -> tuple[Windows, DataLoader]:
    """In a job: windows of `block` bytes to train on, and batches held out; a model made next has this seed's weights.

    Collective over: all ranks.
    """
    mpispeed.init_distributed()
    text, held_out_text = standard_library()
    held_out = Windows(held_out_text, block)
    stride = max(1, len(held_out) // train_gpt.VALIDATION_WINDOWS)
    own = range(0, len(held_out), stride)[: train_gpt.VALIDATION_WINDOWS]
    torch.manual_seed(seed)
    return Windows(text, block), DataLoader(Subset(held_out, own), batch_size=24)


def train(engine: mpispeed.Engine, options: argparse.Namespace, held_out: DataLoader) -> None:
    """In a job: the example's loop without checkpoints; losses go to loss.csv in `options.out`."""
    options.resume = options.save_every = 0
    train_gpt.train(engine, options, held_out)


def write_facts(options: argparse.Namespace, facts: Mapping[str, Any]) -> None:
    """In a job: what the record of this run has beside its losses."""
    (options.out / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def run(script: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses along one job of `script` on one rank and one thread, and the facts that it wrote down."""
    with tempfile.TemporaryDirectory() as place:
        words = ["--model", name, "--seed", str(seed), "--out", place]
        words += ["--steps", str(options.steps), "--eval_every", str(options.eval_every)]
        start = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", "1", script, *words]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = gpt_job.read_csv(Path(place) / "loss.csv")
        facts = Path(place) / "facts.json"
        told = json.loads(facts.read_text(encoding="utf-8")) if facts.exists() else {}
    return {"seed": seed, **told, **gpt_job.curves(rows, "train_loss", "validation_loss")}


def kept_results(path: Path | None, kept: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> Results:
    """Results of every model in `facts`, its facts, with the runs that a record of the same options holds already."""
    held = peers.read_results(path, kept)
    return {name: {**own, "runs": held.get(name, {}).get("runs", [])} for name, own in facts.items()}


def add_runs(
    results: Results, script: str, names: Iterable[str], options: argparse.Namespace, write: Callable[[Results], None]
) -> None:
    """Run these models for each seed that they have no run of; results are written after every run."""
    for seed in options.seeds:
        for name in names:
            runs = results[name]["runs"]
            if any(each["seed"] == seed for each in runs):
                continue
            runs.append(run(script, name, seed, options))
            print(f"{name:10s} seed {seed} validation loss {runs[-1]['validation_loss'][-1]:.4f}", flush=True)
            write(results)


def add_finals(results: Results, baseline: str) -> dict[str, str]:
    """Add the mean final loss of every model that has runs, and its change against the baseline, the first of them.

    Returns:
        The losses in words, for each of these models.
    """
    words = {}
    for name, found in results.items():
        if not found["runs"]:
            continue
        found["final"] = statistics.mean(each["validation_loss"][-1] for each in found["runs"])
        if name != baseline and "final" in results[baseline]:
            found["change_percent"] = 100 * (found["final"] / results[baseline]["final"] - 1)
        of_seeds = ", ".join(f"{each['validation_loss'][-1]:.4f} (seed {each['seed']})" for each in found["runs"])
        words[name] = f"validation loss {found['final']:.4f}: {of_seeds}"
    return words


def draw(
    path: Path,
    results: Results,
    colours: Mapping[str, str],
    title: str,
    label: Callable[[str, Mapping[str, Any]], str],
) -> None:
    """The validation losses of all runs after the first of each; `label` makes a model's from its name and results."""
    with picture(path, 6.0, 3.8, layout="constrained") as figure:
        axes = figure.subplots()
        for name, found in results.items():
            for number, each in enumerate(found["runs"]):
                style = {"color": colours[name], "linewidth": 1.2, "linestyle": ("-", "--", ":")[number % 3]}
                text = None if number else label(name, found)
                axes.plot(each["step"][1:], each["validation_loss"][1:], label=text, **style)
        axes.set(xlabel="step", ylabel="validation loss (nats per byte)", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
