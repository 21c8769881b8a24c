"""What it costs that ranks agree on whether to save or stop: microseconds of one agreement, and the part of training.

    mpispeed run -n 2 benchmarks/micro/walltime.py [--json FILE]

Ranks agree after a step, about once in a second, or after each step where steps are longer. Other steps only count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "step"))
import peers

import mpispeed
from mpispeed.walltime import requests
from mpispeed.walltime.last_safe_step import CHECK_SECONDS

GOAL = 0.001


def microseconds(action: Callable[[], None], calls: int = 500, rounds: int = 7) -> float:
    """Of one call: the median of rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            action()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times)


def measure(folder: str) -> dict[str, Any]:
    """Times of this rank. Collective over: all ranks."""
    settings = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "walltime": {"save_dir": folder, "limit": "1-00:00:00"},
    }
    engine, _, _, _ = mpispeed.initialize(model=torch.nn.Linear(8, 8), config=settings)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    ending, group = engine.run_end, engine.mesh.world.comm
    group.barrier()
    agreement = microseconds(ending._agree)
    requests.LOOK_SECONDS = 0.0
    group.barrier()
    with_files = microseconds(ending._agree)

    def only_count() -> None:
        ending._has_stepped, ending._steps_to_check = True, 2
        ending.end_step()

    step = microseconds(only_count)
    engine.destroy()
    return {"agreement_us": agreement, "agreement_with_files_us": with_files, "other_step_us": step}


def main() -> None:
    """Measure, show on rank 0, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    world = mpispeed.init_distributed()
    with tempfile.TemporaryDirectory() as own:
        results = measure(world.comm.share(own))
        world.comm.barrier()
    results["share"] = results["agreement_with_files_us"] * 1e-6 / CHECK_SECONDS
    if world.rank == 0:
        print(
            f"{world.size} ranks: an agreement takes {results['agreement_us']:.0f} us, with a look for files "
            f"{results['agreement_with_files_us']:.0f} us, another step {results['other_step_us']:.1f} us; once in "
            f"{CHECK_SECONDS:g} s that is {100 * results['share']:.4f} % (goal below {100 * GOAL:g} %)"
        )
        peers.write_record(args.json, "micro/walltime", {"ranks": world.size, "goal": GOAL}, results)


if __name__ == "__main__":
    main()
