"""Tokens per second of stages 0, 1 and 2 beside torch's DistributedDataParallel on gloo, in one run.

    mpispeed run -n 2 benchmarks/step/compare_ddp.py --size 82m

Contenders take turns inside every round, so that whatever else the machine does hits all of them; the figures
are medians over rounds, and ratios to DDP. Each rank computes with one thread. DDP gets torch's fastest
CPU optimizer (AdamW, fused) and gradients as bucket views.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

import peers
import torch


def main() -> None:
    """Run all contenders and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(peers.SIZES), default="82m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in each round")
    parser.add_argument("--overlap", action="store_true", help="overlap_comm: true for the stages")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    world = peers.join_gloo()
    *shape, batch = peers.SIZES[options.size]
    ids = peers.token_ids(tuple(shape), batch // world.size, world.rank)

    def model() -> peers.GPT:
        torch.manual_seed(1)
        return peers.GPT(*shape)

    steps = {"ddp": peers.make_ddp(model())}
    for stage in (0, 1, 2):
        zero = {"stage": stage, "overlap_comm": options.overlap}
        steps[f"stage {stage}"] = peers.engine_step(peers.make_engine(model(), batch, zero))
    contenders = {name: functools.partial(step, ids) for name, step in steps.items()}
    seconds = peers.take_turns(contenders, world.comm.barrier, options.rounds, options.steps)
    if world.rank == 0:
        _report(options, seconds, batch * peers.LENGTH, world.size)
    torch.distributed.destroy_process_group()


def _report(options: argparse.Namespace, seconds: dict[str, list[float]], tokens: int, ranks: int) -> None:
    figures = {}
    print(f"{options.size}, {ranks} ranks, {tokens} tokens per step, {options.rounds} rounds x {options.steps} steps")
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio, by_round = peers.speed_ratios(seconds, "ddp", name)
        figures[name] = {
            "seconds": times,
            "tokens_per_second": tokens / median,
            "ratio_to_ddp": ratio,
            "median_of_round_ratios": by_round,
        }
        spread = (max(times) - min(times)) / median
        print(f"{name:8s} {tokens / median:9.1f} tokens/s   {ratio:5.3f} x DDP   spread {spread:.0%}")
    settings = {"size": options.size, "rounds": options.rounds, "overlap": options.overlap, "ranks": ranks}
    peers.write_record(options.json, "step/compare_ddp", settings, figures)


if __name__ == "__main__":
    main()
