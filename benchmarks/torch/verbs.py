"""Verbs of torch.distributed over MPI beside gloo, in one run on the same tensors.

    mpispeed run -n 2 benchmarks/torch/verbs.py --json benchmarks/results/torch-verbs.json

Both take turns in every round; figures are medians over rounds. "waited" verbs are called with async_op=False,
"started" ones with async_op=True and waited for at once.
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

import mpispeed.torch_backend  # noqa: F401  registers "mpi4py"

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
import peers

SIZES = {"4 KiB": (4 << 10, 50), "64 KiB": (64 << 10, 30), "1 MiB": (1 << 20, 10), "64 MiB": (64 << 20, 1)}
"""Bytes of the whole tensor, and calls in a turn."""

Call = Callable[[object, bool], object]

# Older versions of torch know them by these names, newer ones warn of those.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def verbs(count: int, ranks: int) -> dict[str, Call]:
    """Name -> call with a group and `async_op`. Shapes: whole tensors of `count` floats."""
    x, full, shard = (torch.ones(n) for n in (count, count // ranks * ranks, count // ranks))
    return {
        "all_reduce": lambda group, is_async: dist.all_reduce(x, group=group, async_op=is_async),
        "all_gather": lambda group, is_async: gather(full, shard, group=group, async_op=is_async),
        "reduce_scatter": lambda group, is_async: scatter_sum(shard, full, group=group, async_op=is_async),
    }


def seconds_of(call: Call, group: object, is_async: bool, calls: int) -> float:
    """Seconds of one call; the slowest rank's. Collective over: all ranks."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        work = call(group, is_async)
        if is_async:
            work.wait()  # type: ignore[attr-defined]
    took = torch.tensor((time.perf_counter() - begin) / calls)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def compare(call: Call, groups: dict[str, object], is_async: bool, calls: int, rounds: int) -> dict[str, Any]:
    """Seconds over each group in turns, and how many times as fast as gloo ours is. Collective over: all ranks."""
    times: dict[str, list[float]] = {backend: [] for backend in groups}
    for turn in range(rounds + 1):
        for backend, group in groups.items():
            took = seconds_of(call, group, is_async, calls)
            times[backend] += [took] if turn else []
    ours, gloo = (statistics.median(times[backend]) for backend in groups)
    by_round = statistics.median(g / o for o, g in zip(times["mpi4py"], times["gloo"], strict=True))
    return {"seconds": times, "ratio_to_gloo": gloo / ours, "by_round": by_round}


def shown(found: dict[str, Any]) -> str:
    """A line of the table."""
    ours, gloo = (statistics.median(found["seconds"][backend]) * 1e6 for backend in ("mpi4py", "gloo"))
    return f"{ours:10.0f} us   gloo {gloo:10.0f} us   {found['ratio_to_gloo']:5.2f} ({found['by_round']:5.2f}) x gloo"


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("mpi4py")
    groups = {"mpi4py": None, "gloo": dist.new_group(backend="gloo")}
    figures = {}
    for size, (size_bytes, calls) in SIZES.items():
        for name, call in verbs(size_bytes // 4, dist.get_world_size()).items():
            for kind in ("waited", "started"):
                found = compare(call, groups, kind == "started", calls, options.rounds)
                figures[f"{name} of {size}, {kind}"] = found
                if dist.get_rank() == 0:
                    print(f"{name:15s}{size:>8s} {kind:8s}{shown(found)}", flush=True)
    if dist.get_rank() == 0:
        settings = {"rounds": options.rounds, "ranks": dist.get_world_size()}
        peers.write_record(options.json, "torch/verbs", settings, figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
