"""Milliseconds of a decoded token: fused layers and their cache beside transformers' own, on one rank.

    python benchmarks/inference/kernels.py --threads 2 --json benchmarks/results/inference-kernels.json

All take turns in every round. `plain` is the model of transformers with its DynamicCache, `fused` the same with fused
layers, `growing` with our cache too, and `compiled` (with --compile) the plain one by `torch.compile` with a static
cache. `products` compares the product of few rows with torch's and with a maximum over the same weight, which
reads it once.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
import peers

from mpispeed.inference.fused import inject_kernels
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.native.thin_product import thin_linear

SIZES = {
    "24 M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8},
    "480 M": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 24, "num_attention_heads": 20},
}
CASES = ((1, 32), (1, 1024), (4, 256), (16, 256))
"""Sequences, and tokens in the cache."""
VOCABULARY = 8000


def rounds_of(calls: dict[str, Callable[[], object]], rounds: int, turns: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each call, by rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(turns):
                call()
            times[name] += [(time.perf_counter() - begin) * 1e3 / turns] if turn else []
    return times


def summary(times: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Medians, and how many times as fast as `base` each is, as the median over rounds."""
    faster = {
        name: statistics.median(b / t for b, t in zip(times[base], row, strict=True)) for name, row in times.items()
    }
    return {"milliseconds": times, "median": {n: statistics.median(t) for n, t in times.items()}, "faster": faster}


def products(rounds: int) -> dict[str, Any]:
    """Products of few rows with a weight of 64 MB, which no cache of this processor holds."""
    found = {}
    for dtype, outputs in ((torch.float32, 8192), (torch.bfloat16, 16384)):
        weight = torch.randn(outputs, 2048).to(dtype)
        words = weight.view(torch.float32) if dtype == torch.float32 else weight.view(torch.int32)
        for rows in (1, 2, 4, 8, 16, 32, 64):
            x = torch.randn(rows, 2048).to(dtype)
            calls = {
                "loop": lambda x=x, w=weight: thin_linear(x, w),
                "torch": lambda x=x, w=weight: torch.nn.functional.linear(x, w),
                "read": lambda words=words: words.max(),
            }
            found[f"{rows} rows, {str(dtype)[6:]}"] = summary(rounds_of(calls, rounds), "torch")
    return found


def decoding(size: str, dtype: torch.dtype, rounds: int, *, is_compiled: bool) -> dict[str, Any]:
    """One token for each sequence behind some in the cache."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES[size], vocab_size=VOCABULARY)).to(dtype).eval()
    fused = copy.deepcopy(plain)
    report = inject_kernels(fused, tensor=solo_comm(), max_out_tokens=2048)
    compiled = torch.compile(copy.deepcopy(plain)) if is_compiled else None
    found = {}
    for batch, length in CASES:
        ids = torch.randint(0, VOCABULARY, (batch, length))
        calls: dict[str, Callable[[], object]] = {}
        for name, model, cache in (
            ("plain", plain, None),
            ("fused", fused, None),
            ("growing", fused, report.cache(fused, batch)),
        ):
            kept = model(ids, past_key_values=cache).past_key_values

            def step(model: Any = model, kept: Any = kept, ids: torch.Tensor = ids) -> None:
                model(ids[:, :1], past_key_values=kept)
                kept.crop(-1)

            calls[name] = step
        if compiled is not None:
            static = StaticCache(config=plain.config, max_cache_len=length + 4 * rounds)
            plain(ids, past_key_values=static)
            calls["compiled"] = lambda static=static, ids=ids: compiled(ids[:, :1], past_key_values=static)
        found[f"{size}, {str(dtype)[6:]}, {batch} x {length}"] = summary(rounds_of(calls, rounds), "plain")
    return found


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        figures |= products(options.rounds)
        for size in options.sizes:
            for dtype in (torch.float32, torch.bfloat16):
                figures |= decoding(size, dtype, options.rounds, is_compiled=options.compile)
    for name, found in figures.items():
        shown = "  ".join(f"{n} {ms:8.3f} ms ({found['faster'][n]:.2f})" for n, ms in found["median"].items())
        print(f"{name:34s} {shown}")
    settings = {"rounds": options.rounds, "threads": options.threads}
    peers.write_record(options.json, "inference/kernels", settings, figures)


if __name__ == "__main__":
    main()
