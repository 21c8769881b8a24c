"""Block-sparse attention beside dense attention of torch, documents beside one call for each; memory of both.

    python benchmarks/micro/attention.py [--length 8192] [--threads 2] [--processor-time] [--json FILE]

    sparse      layouts with an eighth of all blocks, forward and backward, non-causal; the peer is torch's dense
                `scaled_dot_product_attention`. random: any blocks, the same for all heads; heads: others for each head;
                fixed: windows, and the last blocks of all windows for everyone; window: a band and the first block
    documents   causal attention inside documents of equal length as one list of pieces; the peer is a loop of torch's
                attention over slices of them

The speed-up is the peer's time by ours. All calls run in turn in every round; the best of all rounds are compared.
`--processor-time` takes the time of the processor instead, for machines with other work; use one thread then.
Memory is what a process of its own needs at most above its inputs, with gradients, random blocks of 64.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import call_times
import torch
from call_times import Call
from torch import Tensor
from torch.nn import functional

from mpispeed.nn.attention import BlockList, attend, attend_blocks, pieces_of

HEADS, WIDTH = 8, 64
GOAL = 4.0
DENSITY = 8
"""One block of so many."""


def random_blocks(heads: int, blocks: int, density: int = DENSITY) -> Tensor:
    """As many key blocks for every query block, drawn."""
    order = torch.rand(heads, blocks, blocks).argsort(-1)
    return torch.zeros(heads, blocks, blocks).scatter_(2, order[..., : blocks // density], 1)


def fixed_blocks(blocks: int) -> Tensor:
    """Windows of a sixteenth, and columns of as many blocks together."""
    layout = torch.block_diag(*[torch.ones(blocks // 16, blocks // 16)] * 16)
    step = max(1, blocks // (blocks // 16))
    layout[:, step - 1 :: step] = 1
    return layout.unsqueeze(0)


def window_blocks(blocks: int) -> Tensor:
    """A band of an eighth, the first row and the first column."""
    place = torch.arange(blocks)
    layout = ((place.unsqueeze(1) - place).abs() <= blocks // DENSITY // 2).float()
    layout[0], layout[:, 0] = 1, 1
    return layout.unsqueeze(0)


LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "random": lambda blocks: random_blocks(1, blocks),
    "heads": lambda blocks: random_blocks(HEADS, blocks),
    "fixed": fixed_blocks,
    "window": window_blocks,
}


def inputs(length: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values, and a gradient."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, HEADS, length, WIDTH).to(dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], grad


def trained(attention: Callable[[], Tensor], wanted: list[Tensor], grad: Tensor) -> Call:
    """Forward and backward."""
    return lambda: torch.autograd.grad(attention(), wanted, grad)


def measure(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Milliseconds and speed-ups of every case."""
    qkv, grad = inputs(options.length, dtype)
    q, k, v = qkv
    dense = trained(lambda: functional.scaled_dot_product_attention(q, k, v), qkv, grad)
    calls: dict[str, tuple[Call, ...]] = {"dense": (dense,)}
    lists: dict[str, BlockList] = {}
    for block in (16, 64, 128):
        for name, layout in LAYOUTS.items():
            blocks = lists[f"block {block:3}, {name}"] = BlockList.of(layout(options.length // block), block)
            calls[f"block {block:3}, {name}"] = (trained(lambda blocks=blocks: attend_blocks(*qkv, blocks), qkv, grad),)
    for count in (4, 32, 128):
        calls[f"{count} documents"] = document_calls(qkv, grad, count)
    clock = time.process_time if options.processor_time else time.perf_counter
    best = call_times.best_in_turn(calls, options.rounds, clock)
    of_dense = best["dense"][0]
    found: dict[str, dict[str, float]] = {"dense": {"ms": 1e3 * of_dense}}
    for name, blocks in lists.items():
        share = blocks.count / (blocks.heads * blocks.query_blocks * blocks.key_blocks)
        found[name] = {"ms": 1e3 * best[name][0], "density": share, "speed_up": of_dense / best[name][0]}
        found[name]["share_of_possible"] = found[name]["speed_up"] * share
    for name, times in best.items():
        if len(times) == 2:
            found[name] = {"ms": 1e3 * times[0], "loop_ms": 1e3 * times[1], "speed_up": times[1] / times[0]}
    return found


def document_calls(qkv: list[Tensor], grad: Tensor, count: int) -> tuple[Call, Call]:
    """One list of pieces, and a loop over slices."""
    length = qkv[0].shape[2]
    spans = [(each * length // count, (each + 1) * length // count) for each in range(count)]
    pieces = pieces_of([(0, length)], [(0, length)], causal=True, spans=[spans])

    def loop() -> object:
        for start, stop in spans:
            parts = [x.detach()[:, :, start:stop].requires_grad_() for x in qkv]
            out = functional.scaled_dot_product_attention(*parts, is_causal=True)
            torch.autograd.grad(out, parts, grad[:, :, start:stop])
        return None

    return trained(lambda: attend(*qkv, pieces), qkv, grad), loop


def status(field: str) -> int:
    """Bytes of this process, of a field of its status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_bytes(length: int, density: int) -> int:
    """Bytes above the inputs that one training step of attention needs; density 0: dense."""
    qkv, grad = inputs(length, torch.float32)
    blocks = BlockList.of(random_blocks(1, length // 64, density), 64) if density else None
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    if blocks is None:
        trained(lambda: functional.scaled_dot_product_attention(*qkv), qkv, grad)()
    else:
        trained(lambda: attend_blocks(*qkv, blocks), qkv, grad)()
    return status("VmHWM") - before


def memory(length: int) -> dict[str, int]:
    """Peak bytes of each density, each in a process of its own."""
    found = {}
    for name, density in {"dense": 0, "1/32": 32, "1/16": 16, "1/8": 8, "1/4": 4, "1/2": 2}.items():
        command = [sys.executable, __file__, "--length", str(length), "--peak", str(density)]
        found[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    """Measure, print a table per dtype, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--dtypes", nargs="+", choices=call_times.DTYPES, default=list(call_times.DTYPES))
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.peak is not None:
        print(peak_bytes(options.length, options.peak))
        return
    del options.peak
    results: dict[str, Any] = {}
    for name, dtype, _ in call_times.settings(options.threads):
        if name.split(",")[0] not in options.dtypes:
            continue
        found = results[name] = measure(options, dtype)
        print(f"{options.length} tokens, {HEADS} heads of {WIDTH} in {name}, best of {options.rounds}")
        for case, row in found.items():
            more = "   ".join(f"{key} {value:.2f}" for key, value in row.items() if key != "ms")
            print(f"  {case:20}{row['ms']:9.1f} ms   {more}")
    results["peak bytes above inputs, fp32"] = memory(options.length)
    for case, size in results["peak bytes above inputs, fp32"].items():
        print(f"  {case:20}{size / 2**20:9.1f} MiB")
    call_times.write_record(
        "micro/attention", options, results, goals={"speed_up": GOAL, "of": "random and heads, block 64 and 128, fp32"}
    )


if __name__ == "__main__":
    main()
