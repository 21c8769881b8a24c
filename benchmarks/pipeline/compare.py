"""Tokens per second of pipelines beside torch.distributed.pipelining on gloo, in one run.

    mpispeed run -n 2 benchmarks/pipeline/compare.py

All train the same GPT from the same weights with the same cut into stages, micro-batches and optimizer (AdamW, torch's
fused); before anything is timed, the losses of some steps have to agree. Contenders take turns inside every round; the
figures are medians over rounds, and ratios to torch's 1F1B. Each rank computes with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from contenders import OURS, SIZES, THEIRS, Step, make_ours, make_theirs, micro_batches

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

BASE = "torch 1f1b"
TOLERANCE = 1e-4
CHECKED_STEPS = 3


def main() -> None:
    """Run all contenders and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="15m")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in each round")
    parser.add_argument("--only", nargs="+", choices=[*THEIRS, *OURS], help="contenders beside torch's 1F1B")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    world = peers.join_gloo()
    data = micro_batches(options.size, options.micro_batches, options.samples)
    wanted = [name for name in (*THEIRS, *OURS) if name == BASE or not options.only or name in options.only]
    contenders: dict[str, Step] = {
        name: make_theirs(options.size, name, data, world.rank, world.size)
        if name in THEIRS
        else make_ours(options.size, name, data, world.size)
        for name in wanted
    }
    losses = {name: [step() for _ in range(CHECKED_STEPS)] for name, step in contenders.items()}
    _check(world.comm.gather_objects(losses))
    seconds = peers.take_turns(contenders, world.comm.barrier, options.rounds, options.steps)
    if world.rank == 0:
        _report(options, seconds, len(data) * options.samples * peers.LENGTH, world.size)
    torch.distributed.destroy_process_group()


def _check(losses: Sequence[Mapping[str, list[float | None]]]) -> None:
    """Refuse contenders that do not train alike. Losses are known on some ranks only; None elsewhere."""
    known = {name: next(of[name] for of in losses if None not in of[name]) for name in losses[0]}
    for name, found in known.items():
        pairs = zip(found, known[BASE], strict=True)
        furthest = max(abs(ours - theirs) for ours, theirs in pairs)  # type: ignore[operator]
        if not furthest <= TOLERANCE:
            msg = f"losses of {name} are {found}, those of {BASE} {known[BASE]}: {furthest:.1e} apart"
            raise SystemExit(msg)


def _report(options: argparse.Namespace, seconds: dict[str, list[float]], tokens: int, ranks: int) -> None:
    figures = {}
    print(
        f"{options.size}, {ranks} stages, {options.micro_batches} micro-batches, {tokens} tokens per step, "
        f"{options.rounds} rounds x {options.steps} steps"
    )
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio, by_round = peers.speed_ratios(seconds, BASE, name)
        figures[name] = {
            "seconds": times,
            "tokens_per_second": tokens / median,
            "ratio_to_torch_1f1b": ratio,
            "median_of_round_ratios": by_round,
        }
        spread = (max(times) - min(times)) / median
        print(
            f"{name:22s} {tokens / median:9.1f} tokens/s   {ratio:5.3f} x {BASE}   by round {by_round:5.3f}   "
            f"spread {spread:.0%}"
        )
    settings = {
        "size": options.size,
        "micro_batches": options.micro_batches,
        "samples": options.samples,
        "rounds": options.rounds,
        "steps": options.steps,
        "ranks": ranks,
    }
    peers.write_record(options.json, "pipeline/compare", settings, figures)


if __name__ == "__main__":
    main()
