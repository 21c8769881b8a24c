"""What benchmarks of short calls share: settings in turn, times of calls beside each other, the record."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Call = Callable[[], object]


def settings(threads: Sequence[int]) -> Iterator[tuple[str, torch.dtype, int]]:
    """Name, dtype and threads of every setting; while one is used, torch has as many threads."""
    for name, dtype in DTYPES.items():
        for count in threads:
            torch.set_num_threads(count)
            yield f"{name}, {count} threads", dtype, count


def seconds_in_turn(
    calls: Mapping[str, Sequence[Call]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[list[float]]]:
    """Seconds of each call in each round, by name and place beside others of the name; all run in turn in every round.

    A round before the first touches the pages and is not counted.
    """
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in beside] for name, beside in calls.items()}
    for turn in range(rounds + 1):
        for name, beside in calls.items():
            for kept, call in zip(seconds[name], beside, strict=True):
                begin = clock()
                call()
                if turn:
                    kept.append(clock() - begin)
    return seconds


def best_in_turn(
    calls: Mapping[str, Sequence[Call]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """The least of `seconds_in_turn` of all rounds, because a neighbour on a shared machine slows single calls down."""
    return {name: [min(times) for times in found] for name, found in seconds_in_turn(calls, rounds, clock).items()}


def write_record(benchmark: str, options: argparse.Namespace, results: Mapping[str, Any], **more: Any) -> None:
    """Write best times with the options and the load average to `options.json`, if it is given."""
    shown = {key: value for key, value in vars(options).items() if key not in ("json", "threads")}
    shown |= {"times": "best of all rounds", "load_average": os.getloadavg()[0], **more}
    peers.write_record(options.json, benchmark, shown, results)
