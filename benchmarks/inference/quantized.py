"""Products with coded weights beside torch's products, and the perplexity of a trained model with its weights coded.

    python benchmarks/inference/quantized.py [--size 4096] [--rows 1 4 8 16 64 512] [--threads 1 2] [--json FILE]

    products     x [rows, size] times the transposed matrix [size, size]: int8 and int4 codes in groups of 128 and 64,
                 beside `F.linear` with the same matrix in fp32 and bf16. For one row also the bytes of codes and scales
                 per second, beside those that a copy of the codes reads: 1 is as fast as a copy of memory.
    perplexity   the GPT of docs/examples after some steps, on windows that it has not seen: all layers of its blocks
                 coded; also with its embedding and the layer to logits

Matrices take turns, so that none of them stays in cache. All calls run in turn in every round; the best times are
compared, because a neighbour on a shared machine slows single calls down. The record has the load average: above the
number of cores, figures of several threads are too low.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import peers
from gpt import GPT, Shape
from text import Windows, standard_library

from mpispeed.inference.quantized import QuantOptions, quantize_model
from mpispeed.native import weight_codes

GOALS = {"perplexity int8": 0.01, "perplexity int4": 0.03}
CODES = {"int8": (8, 128), "int4": (4, 64)}
WAYS = ("int8", "int4", "fp32", "bf16")
BLOCK = 128


def make_weights(size: int, mib: int) -> dict[str, list[Any]]:
    """Way -> matrices of more than `mib` MiB together, one after the other used."""
    source = torch.Generator().manual_seed(0)
    first = torch.randn(size, size, generator=source) * 0.02
    made: dict[str, list[Any]] = {}
    for way in WAYS:
        if way in CODES:
            one = weight_codes.encode(first, *CODES[way])
            count = 1 + (mib << 20) // one.codes.nbytes
            made[way] = [one] + [one._replace(codes=one.codes.clone(), scales=one.scales.clone()) for _ in range(count)]
        else:
            like = first.to({"fp32": torch.float32, "bf16": torch.bfloat16}[way])
            made[way] = [like.clone() for _ in range(1 + (mib << 20) // like.nbytes)]
    return made


def product(way: str, x: Tensor, weight: Any) -> Callable[[], object]:
    """A call; 16-bit ways have x in bf16 too."""
    return (lambda: weight_codes.linear(x, weight)) if way in CODES else (lambda: F.linear(x, weight))


def measure(options: argparse.Namespace, threads: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each way for each number of rows, and for one row the speed of memory."""
    torch.set_num_threads(threads)
    weights = make_weights(options.size, options.mib)
    turns = {way: itertools.cycle(weights[way]) for way in WAYS}
    copies = itertools.cycle([(w.codes, torch.ones_like(w.codes)) for w in weights["int8"]])
    found: dict[str, dict[str, float]] = {}
    for rows in options.rows:
        x = torch.randn(rows, options.size)
        inputs = {way: x.to(torch.bfloat16) if way == "bf16" else x for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in (*WAYS, "copy", "int8, x bf16", "int4, x bf16")}
        for turn in range(options.rounds + 1):
            calls: dict[str, Callable[[], object]] = {way: product(way, inputs[way], next(turns[way])) for way in WAYS}
            calls |= {f"{way}, x bf16": product(way, inputs["bf16"], next(turns[way])) for way in CODES}
            source, target = next(copies)
            calls["copy"] = lambda source=source, target=target: target.copy_(source)  # type: ignore[misc]
            for call_name, call in calls.items():
                begin = time.perf_counter()
                call()
                if turn:
                    seconds[call_name].append(time.perf_counter() - begin)
        row = {f"{name} ms": 1e3 * min(kept) for name, kept in seconds.items()}
        copied = weights["int8"][0].codes.nbytes / min(seconds["copy"])
        for way in CODES:
            one = weights[way][0]
            speed = (one.codes.nbytes + one.scales.nbytes) / min(seconds[way])
            row |= {f"{way} GB/s": speed / 1e9, f"{way} of a copy": speed / copied}
        found[f"{rows} rows"] = {**row, "copy reads GB/s": copied / 1e9}
    return found


def train(steps: int) -> tuple[GPT, Windows]:
    """The example's GPT, and the text that it has not seen."""
    text, held_out = standard_library(4_000_000)
    windows, dice = Windows(text, BLOCK), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = GPT(Shape(layers=3, heads=4, width=128, block=BLOCK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        batch = [windows[i] for i in torch.randint(len(windows), (24,), generator=dice).tolist()]
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        loss = model(*(torch.stack(column) for column in zip(*batch, strict=True)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), Windows(held_out, BLOCK)


@torch.no_grad()
def perplexity(model: GPT, windows: Windows) -> float:
    """Of bytes, over 120 windows."""
    chosen = [windows[i] for i in range(0, len(windows), max(1, len(windows) // 120))]
    x, y = (torch.stack(column) for column in zip(*chosen, strict=True))
    return math.exp(sum(model(a, b).item() * len(a) for a, b in zip(x.split(24), y.split(24), strict=True)) / len(x))


def compare_perplexity(steps: int) -> dict[str, dict[str, float]]:
    """Way of coding -> perplexity, its change, and how many times smaller the weights are."""
    model, windows = train(steps)
    whole = perplexity(model, windows)
    found = {"whole": {"perplexity": whole}}
    cases: dict[str, dict[str, Any]] = {
        "int8": {"bits": 8, "group_size": 64},
        "int8, a group for each output": {"bits": 8, "groups": 1},
        "int8, embedding and logits too": {"bits": 8, "group_size": 64, "heads": True, "embeddings": True},
        "int4": {"bits": 4, "group_size": 64},
        "int4, groups of 32": {"bits": 4, "group_size": 32},
        "int4, groups of 128": {"bits": 4, "group_size": 128},
        "int4, with offsets": {"bits": 4, "group_size": 64, "symmetric": False},
        "int4, logits too": {"bits": 4, "group_size": 64, "heads": True},
        "int4, embedding and logits too": {"bits": 4, "group_size": 64, "heads": True, "embeddings": True},
    }
    for name, settings in cases.items():
        coded = copy.deepcopy(model)
        report = quantize_model(coded, QuantOptions(**settings))
        value = perplexity(coded, windows)
        found[name] = {
            "perplexity": value, "change": value / whole - 1, "smaller": report.bytes_before / report.bytes_after
        }  # fmt: skip
    return found


def main() -> None:
    """Measure, print tables, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mib", type=int, default=96, help="of matrices that take turns: more than the cache")
    parser.add_argument("--steps", type=int, default=200, help="of the training; 0: no perplexities")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for threads in options.threads:
        found = results[f"{threads} threads"] = measure(options, threads)
        print(f"matrix of {options.size} x {options.size}, {threads} threads, ms, best of {options.rounds}")
        for name, row in found.items():
            print(f"  {name:10}" + "".join(f"{key} {value:8.2f}  " for key, value in row.items()), flush=True)
    if options.steps:
        results["perplexity"] = compare_perplexity(options.steps)
        for name, row in results["perplexity"].items():
            print(f"  {name:34}" + "".join(f"{key} {value:9.4f}  " for key, value in row.items()), flush=True)
    shown = {key: value for key, value in vars(options).items() if key not in ("json", "threads")}
    shown |= {"times": "best of all rounds", "load_average": os.getloadavg()[0], "goals": GOALS}
    peers.write_record(options.json, "inference/quantized", shown, results)


if __name__ == "__main__":
    main()
