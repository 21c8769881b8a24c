"""Tokens to experts' rows and back, beside plain copies of the same bytes.

    python benchmarks/micro/permute.py [--tokens 8192] [--width 2048] [--choices 2] [--threads 1 2] [--json FILE]

    pick      out[i] = x[index[i]]            beside a copy of the rows of all choices: each is read and written once
    spread    a token to the rows it chose    beside a copy of (k + 1) / 2 of the tokens: k rows written, one read
    combine   weighted sum of a token's rows  beside the same copy: k rows read, one written
    both      pick, then combine              beside both copies
    dot       gradient of the weights         beside the same copy, half of which is written

Tokens choose `k` of `experts` at random, and rows are sorted by expert. Copies are torch's `copy_`, with as many
threads. Ratios are the copy's time by ours, so 1 is the speed of memory. All calls run in turn in every round, each
beside its copy; the best times of all rounds are compared, because a neighbour on a shared machine slows single calls
down. The record has the load average: above the number of cores, figures of several threads are too low.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import call_times
import torch
from call_times import Call

from mpispeed.native.permute import combine_rows, dot_rows, permute_rows, spread_rows

GOALS = {"both": 0.7}


def make_calls(options: argparse.Namespace, dtype: torch.dtype, threads: int) -> dict[str, tuple[Call, Call]]:
    """Name -> (call, copy of the same bytes)."""
    source = torch.Generator().manual_seed(0)
    tokens, choices, width = options.tokens, options.choices, options.width
    chosen = torch.rand(tokens, options.experts, generator=source).topk(choices).indices
    order = chosen.view(-1).argsort(stable=True)
    index, places = order // choices, torch.empty_like(order)
    places[order] = torch.arange(len(order))
    places = places.view(tokens, choices)
    weights = torch.rand(tokens, choices, generator=source)
    x, out = torch.randn(tokens, width, generator=source).to(dtype), torch.ones(tokens, width, dtype=dtype)
    rows, products = torch.ones(tokens * choices, width, dtype=dtype), torch.zeros(tokens, choices)
    from_all, to_all = rows.clone(), rows.clone()
    half = (choices + 1) * tokens // 2
    from_half, to_half = from_all[:half], to_all[:half]

    def both() -> None:
        permute_rows(rows, x, index, threads=threads)
        combine_rows(out, rows, places, weights, threads=threads)

    def copies() -> None:
        to_all.copy_(from_all)
        to_half.copy_(from_half)

    return {
        "pick": (lambda: permute_rows(rows, x, index, threads=threads), lambda: to_all.copy_(from_all)),
        "spread": (lambda: spread_rows(rows, x, places, threads=threads), lambda: to_half.copy_(from_half)),
        "spread, weighted": (
            lambda: spread_rows(rows, x, places, weights, threads=threads),
            lambda: to_half.copy_(from_half),
        ),
        "combine": (
            lambda: combine_rows(out, rows, places, weights, threads=threads),
            lambda: to_half.copy_(from_half),
        ),
        "both": (both, copies),
        "dot": (lambda: dot_rows(products, x, rows, places, threads=threads), lambda: to_half.copy_(from_half)),
    }


def measure(options: argparse.Namespace, dtype: torch.dtype, threads: int) -> dict[str, dict[str, float]]:
    """Milliseconds and ratios of every call."""
    best = call_times.best_in_turn(make_calls(options, dtype, threads), options.rounds)
    return {
        name: {"ms": 1e3 * ours, "copy_ms": 1e3 * copy, "ratio": copy / ours} for name, (ours, copy) in best.items()
    }


def main() -> None:
    """Measure, print a table per dtype and number of threads, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--choices", type=int, default=2, help="k")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, dtype, threads in call_times.settings(options.threads):
        found = results[name] = measure(options, dtype, threads)
        print(f"{options.tokens} tokens of {options.width} in {name}, best of {options.rounds}")
        for call, row in found.items():
            goal = f"   goal {GOALS[call]}" if call in GOALS else ""
            print(f"  {call:18}{row['ms']:8.2f} ms   copy {row['copy_ms']:8.2f} ms   {row['ratio']:5.2f}{goal}")
    call_times.write_record("micro/permute", options, results, goals=GOALS)


if __name__ == "__main__":
    main()
