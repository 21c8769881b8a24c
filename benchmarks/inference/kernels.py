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
import sys
import time
from collections.abc import Callable
from functools import partial
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
    """The fastest of each, and how many times as fast as that of `base` it is: other jobs only ever slow a round."""
    fastest = {name: min(row) for name, row in times.items()}
    return {"milliseconds": times, "fastest": fastest, "faster": {n: fastest[base] / t for n, t in fastest.items()}}


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
            name = f"{rows} rows, {str(dtype)[6:]}"
            found[name] = summary(rounds_of(calls, rounds), "torch")
            show(name, found[name])
    return found


def decoding(size: str, dtype: torch.dtype, rounds: int, *, is_compiled: bool) -> dict[str, Any]:
    """One token for each sequence behind some in the cache."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES[size], vocab_size=VOCABULARY)).to(dtype).eval()
    fused = copy.deepcopy(plain)
    report = inject_kernels(fused, tensor=solo_comm(), max_out_tokens=2048)
    compiled = torch.compile(copy.deepcopy(plain)) if is_compiled else None
    found = {}
    for batch, length in CASES:
        ids = torch.randint(0, VOCABULARY, (batch, 1))
        caches = {"plain": DynamicCache(), "fused": DynamicCache(), "growing": report.cache(fused, batch)}
        calls: dict[str, Callable[[], object]] = {}
        for name, cache in caches.items():
            fill(cache, plain.config, batch, length, dtype)

            calls[name] = partial(step, plain if name == "plain" else fused, cache, ids)
        if compiled is not None:
            static = StaticCache(config=plain.config, max_cache_len=length + 2 * rounds + 2)
            fill(static, plain.config, batch, length, dtype)
            calls["compiled"] = partial(compiled, ids, past_key_values=static)
        name = f"{size}, {str(dtype)[6:]}, {batch} x {length}"
        found[name] = summary(rounds_of(calls, rounds), "plain")
        show(name, found[name])
    return found


def step(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """One token, which is forgotten again."""
    model(ids, past_key_values=cache)
    cache.crop(-1)


def fill(cache: Any, config: Any, batch: int, length: int, dtype: torch.dtype) -> None:
    """Keys and values as of a prompt."""
    shape = (batch, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), layer)


def show(name: str, found: dict[str, Any]) -> None:
    """Print a row."""
    cells = (f"{n} {ms:8.3f} ms ({found['faster'][n]:.2f})" for n, ms in found["fastest"].items())
    print(f"{name:34s} {'  '.join(cells)}", flush=True)


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
    settings = {"rounds": options.rounds, "threads": options.threads}
    peers.write_record(options.json, "inference/kernels", settings, figures)


if __name__ == "__main__":
    main()
