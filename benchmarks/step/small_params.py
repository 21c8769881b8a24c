"""What stage 3 costs on a model of 2,000 small parameters: its step time over stage 0's, in one run.

    mpispeed run -n 2 benchmarks/step/small_params.py --json benchmarks/results/small-params.json

The model is a chain of 1,000 `Linear(16, 16)`, so that handling parameters outweighs computing with them. Stage 3 is
timed with the default `param_persistence_threshold`, under which all of them stay whole, and with 0, under which
none does. Contenders take turns inside every round; each rank computes with one thread.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

import peers
import torch
from torch import nn

WIDTH, ROWS = 16, 8
CONTENDERS = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3},
    "stage 3, threshold 0": {"stage": 3, "param_persistence_threshold": 0},
}


class Chain(nn.Module):
    """Linear layers one after the other, that return their loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean square of the output. Shapes: x [rows, WIDTH]."""
        for layer in self.layers:
            x = x + layer(x).tanh() / len(self.layers)
        return x.square().mean()


def main() -> None:
    """Run all contenders and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in each round")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    world = peers.join()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 + world.rank))
    steps, counts = {}, {}
    for name in options.only:
        torch.manual_seed(1)
        model = Chain(options.layers)
        counts[name] = sum(1 for _ in model.parameters())
        engine = peers.make_engine(model, ROWS * world.size, CONTENDERS[name])
        steps[name] = functools.partial(peers.engine_step(engine), x)
    seconds = peers.take_turns(steps, world.comm.barrier, options.rounds, options.steps)
    if world.rank == 0:
        _report(options, seconds, counts, world.size)


def _report(options: argparse.Namespace, seconds: dict[str, list[float]], counts: dict[str, int], ranks: int) -> None:
    figures = {}
    base = next(iter(seconds))
    print(f"{options.layers} layers, {ranks} ranks, {options.rounds} rounds x {options.steps} steps")
    for name, times in seconds.items():
        speed, by_round = peers.speed_ratios(seconds, base, name)
        figures[name] = {
            "seconds": times, "parameters": counts[name], "time_ratio": 1 / speed,
            "median_of_round_time_ratios": 1 / by_round,
        }  # fmt: skip
        spread = (max(times) - min(times)) / statistics.median(times)
        print(
            f"{name:22s} {1000 * statistics.median(times):8.1f} ms   {1 / speed:5.2f} ({1 / by_round:5.2f}) x the time "
            f"of {base}   spread {spread:.0%}"
        )
    settings = {"layers": options.layers, "rounds": options.rounds, "steps": options.steps, "ranks": ranks}
    peers.write_record(options.json, "step/small_params", settings, figures)


if __name__ == "__main__":
    main()
