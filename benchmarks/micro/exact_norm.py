"""The exact sum of squares over all ranks, beside a gather of doubles as it was before, in one run.

    mpirun -n 2 python benchmarks/micro/exact_norm.py [--partials 2 40 266] [--rounds 41] [--json FILE]

    sum      `grad_shards.sum_squares`: doubles of this rank in limbs, one sum of 72 integers, the nearest double
    gather   doubles of this rank made few that do not overlap (Shewchuk 1997), one gather of 64 of each rank, fsum
    message  the sum of 72 integers alone, beside the gather of 64 doubles alone

A rank has so many partial sums: about 2 for each unit of parameters. A round is 200 calls of each in turn, timed as
the slowest rank; medians of rounds. The ratio is the gather's time by ours: from 1 on ours is no slower.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

from mpispeed.mesh import Mesh, Topology, start
from mpispeed.native import exact_sum
from mpispeed.sharding.grad_shards import sum_limbs, sum_squares

CALLS, SLOTS, NOTES = 200, 64, 8


def few(values: Iterable[float]) -> list[float]:
    """Non-overlapping doubles with exactly the same sum."""
    partials: list[float] = []
    for value in values:
        kept, high = 0, value
        for other in partials:
            big, small = (high, other) if abs(high) >= abs(other) else (other, high)
            high = big + small
            low = small - (high - big)
            if low:
                partials[kept] = low
                kept += 1
        partials[kept:] = [high]
    return partials


def make_calls(mesh: Mesh, partials: list[float]) -> dict[str, Callable[[], Any]]:
    """Name -> call. Collective over: all ranks, each call too."""
    comm, notes = mesh[mesh.topology.names], [1, 0]

    def by_sum() -> float:
        return sum_squares(mesh, exact_sum.limbs_of(partials), None, notes)[0]

    def by_gather() -> float:
        row = torch.zeros(SLOTS, dtype=torch.float64)
        own = few(partials)
        row[: len(own)] = torch.tensor(own, dtype=torch.float64)
        row[SLOTS - NOTES : SLOTS - NOTES + len(notes)] = torch.tensor(notes, dtype=torch.float64)
        everyone = torch.empty(comm.size * SLOTS, dtype=torch.float64)
        comm.all_gather(everyone, row)
        table = everyone.view(comm.size, SLOTS)
        if not bool(torch.isfinite(table[:, :-NOTES]).all()):
            return math.nan
        return math.fsum(table[:, :-NOTES].flatten().tolist())

    if by_sum() != by_gather():
        msg = f"rank {comm.rank}: the sum gives {by_sum()!r}, the gather {by_gather()!r}"
        raise SystemExit(msg)
    limbs, row = exact_sum.limbs_of(partials), torch.zeros(SLOTS, dtype=torch.float64)
    everyone = torch.empty(comm.size * SLOTS, dtype=torch.float64)
    return {
        "sum": by_sum,
        "gather": by_gather,
        "message": lambda: sum_limbs(mesh, limbs, notes),
        "message of gather": lambda: comm.all_gather(everyone, row),
    }


def measure(mesh: Mesh, count: int, rounds: int) -> dict[str, float]:
    """Microseconds of every call, and ratios. Collective over: all ranks."""
    comm = mesh[mesh.topology.names]
    source = torch.Generator().manual_seed(comm.rank)
    partials = torch.rand(count, dtype=torch.float64, generator=source).pow(9).tolist()
    calls = make_calls(mesh, partials)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            seconds[name].append(max(comm.gather_objects(time.perf_counter() - begin)) / CALLS)
    found = {f"{name} us": 1e6 * statistics.median(times) for name, times in seconds.items()}
    of_medians, by_round = peers.speed_ratios(seconds, "gather", "sum")
    return found | {"ratio": of_medians, "ratio by round": by_round}


def main() -> None:
    """Measure, print a line per number of partials, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partials", type=int, nargs="+", default=[2, 40, 266])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = start()
    mesh = Mesh(Topology({"data": world.comm.size}), world)
    results = {f"{count} partials": measure(mesh, count, options.rounds) for count in options.partials}
    if mesh.rank == 0:
        for name, row in results.items():
            print(name, "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
        shown = {"ranks": world.comm.size, "rounds": options.rounds, "calls of a round": CALLS}
        peers.write_record(options.json, "micro/exact_norm", shown, results)


if __name__ == "__main__":
    main()
