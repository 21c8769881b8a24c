"""Sums of small messages, as decoding with tensor parallelism makes them, beside gloo's in the same run.

    mpispeed run -n 2 benchmarks/inference/small_messages.py --json benchmarks/results/small-messages-2-ranks.json

All take turns in every round: `mpispeed` is what a program gets, `messages` the same without shared memory, `gloo` is
torch.distributed's. Figures are microseconds of one call, by rounds, each as slow as its slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
import peers

SIZES = {f"{kib} KiB": (kib << 10, 100 if kib < 256 else 25) for kib in (1, 4, 16, 64, 256, 1024)}
"""Bytes of the tensor, and calls in a turn."""


def contenders(world: Any, plain: Any, count: int, dtype: torch.dtype) -> dict[str, dict[str, Callable[[], object]]]:
    """Verb -> contender -> call."""
    x = torch.zeros(count, dtype=dtype)
    out, shard = (
        torch.zeros(count // world.size * world.size, dtype=dtype),
        torch.zeros(count // world.size, dtype=dtype),
    )
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    comm = world.comm
    return {
        "all_reduce": {
            "mpispeed": lambda: comm.all_reduce(x),
            "messages": lambda: plain.all_reduce(x),
            "gloo": lambda: dist.all_reduce(x),
        },
        "all_gather": {
            "mpispeed": lambda: comm.all_gather(out, shard),
            "messages": lambda: plain.all_gather(out, shard),
            "gloo": lambda: gather(out, shard),
        },
    }


def compare(world: Any, calls: dict[str, Callable[[], object]], turns: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a call of each, by rounds. Collective over: all ranks."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            call()
            world.comm.barrier()
            begin = time.perf_counter()
            for _ in range(turns):
                call()
            took = max(world.comm.gather_objects(time.perf_counter() - begin)) / turns
            times[name] += [took * 1e6] if turn else []
    ours, gloo = times["mpispeed"], times["gloo"]
    return {
        "microseconds": times,
        "gloo_to_ours": statistics.median(gloo) / statistics.median(ours),
        "by_round": statistics.median(g / o for o, g in zip(ours, gloo, strict=True)),
    }


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = peers.join_gloo()
    plain = world.comm.duplicate()
    plain.group.limits.one_shot_bytes = 0
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        for size, (nbytes, turns) in SIZES.items():
            for verb, calls in contenders(world, plain, nbytes // dtype.itemsize, dtype).items():
                found = compare(world, calls, turns, options.rounds)
                name = f"{verb} of {size}, {str(dtype).removeprefix('torch.')}"
                figures[name] = found
                if world.rank == 0:
                    shown = "".join(
                        f"{key} {statistics.median(row):8.1f} us   " for key, row in found["microseconds"].items()
                    )
                    print(
                        f"{name:34s}{shown}{found['gloo_to_ours']:6.2f} ({found['by_round']:5.2f}) x gloo", flush=True
                    )
    if world.rank == 0:
        settings = {"rounds": options.rounds, "ranks": world.size}
        peers.write_record(options.json, "inference/small_messages", settings, figures)
    plain.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
