"""Block quantizers beside their torch references and beside a copy of the same floats.

    python benchmarks/micro/block_quant.py [--elements 16e6] [--block 4096] [--threads 1] [--rounds 7] [--json FILE]

The copy is torch's `copy_` of the fp32 buffer (4 bytes read, 4 written per element): what a gather or a
reduction moves at least once when nothing is quantized. The references do the same arithmetic as a chain of
torch operations. All candidates run in turn in every round; medians are shown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mpispeed.native import block_quant as bq
from mpispeed.native.codes import Coded, Grid

COPY = "copy fp32"


def candidates(grid: Grid, threads: int) -> dict[str, tuple[Callable[[], object], Callable[[], object] | None]]:
    """Name -> (call, the same by the reference)."""
    x = torch.randn(grid.numel)
    out, x16, out16 = torch.empty_like(x), x.bfloat16(), torch.empty(grid.numel, dtype=torch.bfloat16)
    found: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {COPY: (lambda: out.copy_(x), None)}

    def add(
        name: str, call: Callable[..., None], reference: Callable[..., None], *arguments: object, **named: object
    ) -> None:
        found[name] = (
            lambda: call(*arguments, grid, threads=threads, **named),
            lambda: reference(*arguments, grid, **named),
        )

    for bits in (8, 4):
        coded = Coded.zeros(grid, bits)
        add(f"quantize fp32 to {bits} bits", bq.quantize, bq.quantize_reference, coded, x)
        add(f"quantize bf16 to {bits} bits", bq.quantize, bq.quantize_reference, coded, x16)
        add(f"dequantize {bits} bits to fp32", bq.dequantize, bq.dequantize_reference, out, coded)
        add(f"dequantize {bits} bits to bf16", bq.dequantize, bq.dequantize_reference, out16, coded)
    parts = [Coded.zeros(grid, 4) for _ in range(4)]
    for part in parts:
        bq.quantize(part, x, grid)
    again = Coded.zeros(grid, 4)
    add("dequantize and add 4 bits", bq.dequantize_add, bq.dequantize_add_reference, out, parts[0])
    add("sum of 4 parts of 4 bits", bq.dequantize_sum, bq.dequantize_sum_reference, out, parts)
    add("sum of 4 parts, to 4 bits", bq.sum_requantize, bq.sum_requantize_reference, again, parts)
    error = Coded.zeros(grid, 8)
    kept = {"error": error, "beta": 0.8}
    add("quantize to 4 bits, keep error", bq.quantize, bq.quantize_reference, again, x, **kept)
    return found


def main() -> None:
    """Measure, print a table, and write it with machine and date when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=16e6)
    parser.add_argument("--block", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    grid = Grid(int(options.elements), options.block)
    calls = candidates(grid, options.threads)
    seconds: dict[tuple[str, bool], list[float]] = {}
    for turn in range(options.rounds + 1):
        for name, both in calls.items():
            for is_twin, call in enumerate(both):
                if call is None:
                    continue
                begin = time.perf_counter()
                call()
                if turn:  # the first round touches the pages
                    seconds.setdefault((name, bool(is_twin)), []).append(time.perf_counter() - begin)
    median = {key: statistics.median(times) for key, times in seconds.items()}
    copy = median[COPY, False]
    rows = {}
    print(
        f"{grid.numel} elements, blocks of {grid.block}, {options.threads} threads, median of {options.rounds} rounds"
    )
    for name, (_, reference) in calls.items():
        ours = median[name, False]
        row = {"ms": 1e3 * ours, "time_of_copy": ours / copy}
        if reference is not None:
            row["twin_is_slower_by"] = median[name, True] / ours
        rows[name] = row
        said = f" twin {row['twin_is_slower_by']:6.1f} x slower" if reference is not None else ""
        print(f"{name:32} {row['ms']:9.2f} ms {row['time_of_copy']:6.2f} x copy{said}")
    if options.json:
        header = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine()}
        header |= {"elements": grid.numel, "block": grid.block, "threads": options.threads}
        options.json.write_text(json.dumps({**header, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
