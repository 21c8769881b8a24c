"""Coding of the one-bit mean without a network, beside torch loops that read and write the same fp32 memory.

    python benchmarks/micro/one_bit.py [--mib 64] [--ranks 4] [--threads 1 2] [--rounds 9] [--json FILE]

    compensate   error += x                         beside  error.add_(x)     two streams read, one written
    pack         signs of error, error -= decoded   beside  error.mul_(1)     one read, one written
    unpack       out = scale * sign                 beside  out.fill_(1)      one written
    add_parts    error += parts of all ranks        beside  error.mul_(1)     on a chunk: 1 / ranks of the elements
    codec        what a rank does in one mean: compensate, pack, add_parts, pack of the chunk, unpack; beside the
                 loops above one after the other

Bits are left out of the traffic: they are a 32nd of one stream. Ratios are the loop's time by ours, so 1 is the speed
of memory. All calls run in turn in every round, a call and its loop back to back; medians of times and of the rounds'
ratios are shown. Run it on a quiet machine: a neighbour takes memory bandwidth from one and not from the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import call_times
import torch
from call_times import Call

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

from mpispeed.native.one_bit import add_parts, compensate, decode, encode, scale_of

GOALS = {"pack": 0.5, "unpack": 1.0, "codec": 0.9}


def make_calls(count: int, ranks: int, threads: int) -> dict[str, tuple[Call, Call]]:
    """Name -> (call, loop of the same traffic)."""
    source = torch.Generator().manual_seed(0)
    x, out = torch.randn(count, generator=source), torch.zeros(count)
    error, bits = torch.zeros(count), torch.zeros(count // 8, dtype=torch.uint8)
    server = torch.zeros(count // ranks)
    parts, chunk_bits = bits.chunk(ranks), torch.zeros(count // ranks // 8, dtype=torch.uint8)
    weights, scale = [1.0 / ranks] * ranks, 1.0
    plain, chunk = torch.ones(count), torch.ones(count // ranks)

    def codec() -> None:
        encode(bits, error, scale_of(compensate(error, x, threads=threads), count), threads=threads)
        squares = add_parts(server, parts, weights, threads=threads)
        encode(chunk_bits, server, scale_of(squares, server.numel()), threads=threads)
        decode(out, bits, scale, threads=threads)

    def streams() -> None:
        plain.add_(x, alpha=0.0)
        plain.mul_(1.0)
        chunk.mul_(1.0)
        chunk.mul_(1.0)
        out.fill_(1.0)

    return {
        "compensate": (lambda: compensate(error, x, threads=threads), lambda: plain.add_(x)),
        "pack": (lambda: encode(bits, error, scale, threads=threads), lambda: plain.mul_(1.0)),
        "unpack": (lambda: decode(out, bits, scale, threads=threads), lambda: out.fill_(1.0)),
        "add_parts": (lambda: add_parts(server, parts, weights, threads=threads), lambda: chunk.mul_(1.0)),
        "codec": (codec, streams),
    }


def measure(count: int, ranks: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and ratios of every call."""
    torch.set_num_threads(threads)
    seconds = call_times.seconds_in_turn(make_calls(count, ranks, threads), rounds)
    found = {}
    for name, (ours, loop) in seconds.items():
        of_medians, by_round = peers.speed_ratios({"loop": loop, "ours": ours}, "loop", "ours")
        found[name] = {
            "ms": 1e3 * statistics.median(ours),
            "loop_ms": 1e3 * statistics.median(loop),
            "ratio": of_medians,
            "ratio_by_round": by_round,
        }
    return found


def main() -> None:
    """Measure, print a table per number of threads, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the fp32 values")
    parser.add_argument("--ranks", type=int, default=4, help="whose parts a rank adds up")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unit = 8 * options.ranks
    count = options.mib * 2**18 // unit * unit
    results: dict[str, Any] = {}
    for threads in options.threads:
        found = results[f"{threads} threads"] = measure(count, options.ranks, threads, options.rounds)
        print(f"{count} elements, {threads} threads, median of {options.rounds} rounds")
        for name, row in found.items():
            goal = f"   goal {GOALS[name]}" if name in GOALS else ""
            print(f"  {name:12}{row['ms']:8.2f} ms   loop {row['loop_ms']:8.2f} ms   {row['ratio']:5.2f}"
                  f"   by round {row['ratio_by_round']:5.2f}{goal}")  # fmt: skip
    shown = {"mib": options.mib, "ranks": options.ranks, "rounds": options.rounds, "goals": GOALS}
    peers.write_record(options.json, "micro/one_bit", shown, results)


if __name__ == "__main__":
    main()
