"""Training steps of torch's DDP and FSDP2 over MPI beside the same over gloo, in one run.

    mpispeed run -n 2 benchmarks/torch/train.py --size 82m --json benchmarks/results/torch-train-82m.json

All contenders take turns inside every round; ratios are to the same wrapper over gloo: of the medians, and the median
of the rounds' ratios. Each rank computes with one thread.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
import peers


def main() -> None:
    """Run all contenders and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(peers.SIZES), default="82m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in each round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    world = peers.join()
    groups = {"mpi4py": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    *shape, batch = peers.SIZES[options.size]
    ids = peers.token_ids(tuple(shape), batch // world.size, world.rank)
    contenders = {}
    for backend, group in groups.items():
        for kind in ("ddp", "fsdp2"):
            torch.manual_seed(1)
            model = peers.GPT(*shape)
            if kind == "ddp":
                step = peers.make_ddp(model, group=group)
            else:
                step = peers.make_fsdp(model, mesh=DeviceMesh.from_group(group, "cpu"))
            contenders[f"{kind} {backend}"] = functools.partial(step, ids)
    seconds = peers.take_turns(contenders, world.comm.barrier, options.rounds, options.steps)
    if world.rank == 0:
        _report(options, seconds, batch * peers.LENGTH, world.size)
    dist.destroy_process_group()


def _report(options: argparse.Namespace, seconds: dict[str, list[float]], tokens: int, ranks: int) -> None:
    figures = {}
    print(f"{options.size}, {ranks} ranks, {tokens} tokens per step, {options.rounds} rounds x {options.steps} steps")
    for name, times in seconds.items():
        median, base = statistics.median(times), f"{name.split()[0]} gloo"
        ratio, by_round = peers.speed_ratios(seconds, base, name)
        figures[name] = {"seconds": times, "ratio_to_gloo": ratio, "median_of_round_ratios": by_round}
        spread = (max(times) - min(times)) / median
        print(
            f"{name:14s} {tokens / median:9.1f} tokens/s   {ratio:5.3f} ({by_round:5.3f}) x gloo   spread {spread:.0%}"
        )
    settings = {"size": options.size, "rounds": options.rounds, "steps": options.steps, "ranks": ranks}
    peers.write_record(options.json, "torch/train", settings, figures)


if __name__ == "__main__":
    main()
