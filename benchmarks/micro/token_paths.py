"""Tokens that pass a layer and tokens that do not: the passes of random-LTD beside copies of the same bytes, and torch.

    python benchmarks/micro/token_paths.py [--samples 8] [--tokens 1024] [--width 1024] [--threads 1 2] [--json FILE]

    take      the kept tokens of every sample                     beside a copy of them
    put       them in their places, the others as they were       beside a copy of all tokens
    backward  both gradients: picked, and joined with the rest    beside both copies
    choose    places of all samples, by a key                     beside a copy of as many tokens as are chosen

Half of the tokens are kept. Copies are torch's `clone`, with new memory as the calls themselves and as many threads;
ratios are the copy's time by ours, so 1 is the speed of memory. `torch` is the time of gather and scatter of torch for
the same, by ours. All calls run in turn in every round; the best times of all rounds are compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

from mpispeed.native.token_choice import choose, choose_reference, key_of
from mpispeed.native.token_drop import put, take

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HOST = torch.device("cpu")
Call = Callable[[], object]


def make_calls(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, tuple[Call, Call, Call]]:
    """Name -> (call, torch's own, copy of the same bytes)."""
    samples, tokens, width = options.samples, options.tokens, options.width
    kept, key = tokens // 2, key_of(1, 2, 3)
    index = choose(key, 0, samples, tokens, kept, HOST)
    places = index.long()[:, :, None].expand(-1, -1, width)
    x = torch.randn(samples, tokens, width).to(dtype)
    y, slope = x[:, :kept].clone(), torch.ones_like(x)
    leaf, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    taken, rest = take(leaf, index)
    ours = put(taken, index, rest)
    plain = theirs.scatter(1, places, theirs.gather(1, places))

    return {
        "take": (lambda: take(x, index), lambda: x.gather(1, places), y.clone),
        "put": (lambda: put(y, index, x), lambda: x.scatter(1, places, y), x.clone),
        "backward": (
            lambda: torch.autograd.grad(ours, leaf, slope, retain_graph=True),
            lambda: torch.autograd.grad(plain, theirs, slope, retain_graph=True),
            lambda: (y.clone(), x.clone()),
        ),
        "choose": (
            lambda: choose(key, 0, samples, tokens, kept, HOST),
            lambda: choose_reference(key, 0, samples, tokens, kept, HOST),
            y.clone,
        ),
    }


def measure(options: argparse.Namespace, dtype: torch.dtype, threads: int) -> dict[str, dict[str, float]]:
    """Milliseconds and ratios of every call; the first round touches the pages and is not counted."""
    torch.set_num_threads(threads)
    calls = make_calls(options, dtype)
    seconds: dict[str, tuple[list[float], ...]] = {name: ([], [], []) for name in calls}
    for turn in range(options.rounds + 1):
        for name, triple in calls.items():
            for kept, call in zip(seconds[name], triple, strict=True):
                begin = time.perf_counter()
                call()
                if turn:
                    kept.append(time.perf_counter() - begin)
    best = {name: [min(times) for times in found] for name, found in seconds.items()}
    return {
        name: {"ms": 1e3 * ours, "ratio": copy / ours, "torch": plain / ours}
        for name, (ours, plain, copy) in best.items()
    }


def main() -> None:
    """Measure, print a table per dtype and number of threads, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--samples", 8), ("--tokens", 1024), ("--width", 1024), ("--rounds", 25)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for threads in options.threads:
            found = results[f"{name}, {threads} threads"] = measure(options, dtype, threads)
            print(f"{options.samples} x {options.tokens} x {options.width} in {name}, {threads} threads")
            for call, row in found.items():
                print(f"  {call:10}{row['ms']:8.2f} ms   copy {row['ratio']:5.2f}   torch {row['torch']:5.2f}")
    shown = {key: value for key, value in vars(options).items() if key not in ("json", "threads")}
    shown |= {"times": "best of all rounds", "load_average": os.getloadavg()[0]}
    peers.write_record(options.json, "micro/token_paths", shown, results)


if __name__ == "__main__":
    main()
