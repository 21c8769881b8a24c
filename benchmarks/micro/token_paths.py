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
from pathlib import Path
from typing import Any

import call_times
import torch
from call_times import Call

from mpispeed.native.token_choice import choose, choose_reference, key_of
from mpispeed.native.token_drop import put, take

HOST = torch.device("cpu")


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


def measure(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Milliseconds and ratios of every call."""
    best = call_times.best_in_turn(make_calls(options, dtype), options.rounds)
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
    for name, dtype, _ in call_times.settings(options.threads):
        found = results[name] = measure(options, dtype)
        print(f"{options.samples} x {options.tokens} x {options.width} in {name}")
        for call, row in found.items():
            print(f"  {call:10}{row['ms']:8.2f} ms   copy {row['ratio']:5.2f}   torch {row['torch']:5.2f}")
    call_times.write_record("micro/token_paths", options, results)


if __name__ == "__main__":
    main()
