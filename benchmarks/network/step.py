"""A training step with 1-bit Adam in its compressed phase beside Adam, over a slow link between two hosts.

    python benchmarks/network/step.py --rate 100mbit

Start it without mpirun, as root: it makes two hosts on this machine (`hosts.py`), starts one rank on each, and removes
them. Both engines train the same GPT from the same weights on the same tokens at stage 0 in fp32; they are measured
after 1-bit Adam has frozen its variance, in turns inside every round. Figures are medians over rounds, and ratios to
Adam. Each rank computes with one thread. `alone` is the same step on one rank's part of the batch without a peer, on
both hosts at a time: what a network without cost would leave.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import hosts
import peers
from turns import spread, take_turns

FREEZE_STEP = 3
RATE = 1e-4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"type": "Adam", "params": {"lr": RATE}},
    "1-bit adam": {"type": "OneBitAdam", "params": {"lr": RATE, "freeze_step": FREEZE_STEP}},
}
LEAST_SAVING = 8  # 1 bit for 32, less the scales and what is not compressed
BASE, ALONE = "adam", "alone"


def make_steps(options: argparse.Namespace, world: Any) -> dict[str, Callable[[], None]]:
    """One training step of each contender. Collective over: all ranks."""
    *shape, batch = peers.SIZES[options.size]
    ids = peers.token_ids(tuple(shape), batch // world.size, world.rank)
    steps = {}
    for name in options.only:
        torch.manual_seed(1)
        engine = peers.make_engine(peers.GPT(*shape), batch, {"stage": 0}, optimizer=OPTIMIZERS[name])
        steps[name] = functools.partial(peers.engine_step(engine), ids)
    torch.manual_seed(1)
    steps[ALONE] = functools.partial(_torch_step(peers.GPT(*shape)), ids)
    return steps


def _torch_step(model: torch.nn.Module) -> peers.Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(ids).backward()
        optimizer.step()

    return step


def run_worker(options: argparse.Namespace) -> None:
    """Measure the steps and write the figures of rank 0. Collective over: all ranks."""
    world = peers.join()
    steps = make_steps(options, world)
    for step in steps.values():
        for _ in range(FREEZE_STEP + 2):
            step()
    figures = take_turns(world, steps, options.rounds)
    if world.rank == 0:
        options.json.write_text(json.dumps(figures))


def report(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print and write the figures."""
    seconds = {name: of_one["seconds"] for name, of_one in figures.items()}
    batch = peers.SIZES[options.size][-1]
    for name in options.only[1:]:
        if figures[name]["journal"] > figures[BASE]["journal"] / LEAST_SAVING:
            sys.exit(
                f"step: {name} sent {figures[name]['journal']:.0f} bytes a step: it is not in its compressed phase"
            )
    print(f"{options.size}, {batch} x {peers.LENGTH} tokens a step, 2 hosts of 1 rank, {options.rate}")
    for name, of_one in figures.items():
        ratio, by_round = peers.speed_ratios(seconds, BASE, name)
        of_one["ratio_to_adam"], of_one["median_of_round_ratios"] = ratio, by_round
        times = of_one["seconds"]
        print(
            f"{name:12s}{statistics.median(times):8.3f} s   {ratio:6.2f} x adam   by round {by_round:6.2f}   "
            f"sent {of_one['journal'] / 1e6:.3f} MB, by device {of_one['device'] / 1e6:.3f} MB   "
            f"spread {spread(times):.0%}"
        )
    settings = {name: getattr(options, name) for name in ("size", "rate", "rounds")}
    peers.write_record(options.json, "network/step", {**settings, "freeze_step": FREEZE_STEP, "ranks": 2}, figures)


def main() -> None:
    """Make the hosts and run the job on them, or what a rank does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(peers.SIZES), default="7.4m")
    parser.add_argument("--rate", default="100mbit", help="limit of what a host sends, as tc writes it, or none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which the job is ended")
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="adam always runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", action="store_true", help="used for the job")
    options = parser.parse_args()
    options.only = [name for name in OPTIMIZERS if name == BASE or name in options.only]
    if options.worker:
        run_worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        words = ["--worker", "--size", options.size, "--rounds", str(options.rounds), "--json", str(path)]
        with hosts.joined_hosts(2, options.rate) as joined:
            status = joined.run([__file__, *words, "--only", *options.only], 1, options.timeout)
        if status:
            sys.exit(f"step: the job ended with {status}")
        figures = json.loads(path.read_text())
    report(options, figures)


if __name__ == "__main__":
    main()
