"""One Adam step on the host beside torch's fused AdamW and beside a loop that only moves the same bytes.

    python benchmarks/micro/adam.py [--elements 20e6] [--threads 1] [--rounds 7] [--json FILE]

The bare loop reads four and writes three fp32 streams in place (4R3W), with next to no arithmetic: it is
the most that memory allows. All candidates run in turn in every round; medians are shown. The bare loop is
compiled on the fly, with the compiler named in CC or `cc`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mpispeed.native.host_optim import adam
from mpispeed.native.reduce import square_partials, tree_sum

BARE_LOOP = """
#include <stddef.h>
__attribute__((target_clones("avx512f", "avx2", "default")))
static void span(float *p, float *m, float *v, const float *g, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        for (size_t q = i + 512; q < i + 576; q += 16) {
            __builtin_prefetch(p + q, 1); __builtin_prefetch(m + q, 1);
            __builtin_prefetch(v + q, 1); __builtin_prefetch(g + q, 0);
        }
        _Pragma("omp simd") for (size_t j = i; j < i + 64; j++) { p[j] += g[j]; m[j] += g[j]; v[j] += g[j]; }
    }
}
void bare(float *p, float *m, float *v, const float *g, size_t n, int threads) {
    size_t each = n / threads / 1024 * 1024;
#pragma omp parallel for num_threads(threads)
    for (int k = 0; k < threads; k++) span(p + k * each, m + k * each, v + k * each, g + k * each, each);
}
"""


def build_bare_loop(folder: Path) -> Callable[..., None]:
    """The 4R3W loop as a function of four addresses, a count and a thread count."""
    source, library = folder / "bare.c", folder / "bare.so"
    source.write_text(BARE_LOOP)
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-O3", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).bare
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t, ctypes.c_int]
    function.restype = None
    return function


def candidates(count: int, threads: int, bare: Callable[..., None]) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name -> (bytes per element, call)."""
    state = [torch.rand(count) for _ in range(3)]
    grad = torch.rand(count) * 1e-3
    grad16, out16 = grad.bfloat16(), torch.empty(count, dtype=torch.bfloat16)
    half, out_half = grad.half(), torch.empty(count, dtype=torch.float16)
    other = [torch.zeros(count) for _ in range(3)]
    param = torch.nn.Parameter(torch.rand(count))
    param.grad = grad
    fused = torch.optim.AdamW([param], lr=1e-3, fused=True)
    settings = {"step": 5, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "decoupled": True}
    streams = [*other, grad]
    parts = [torch.rand(count).bfloat16() for _ in range(4)]
    return {
        "4R3W": (28, lambda: bare(*(x.data_ptr() for x in streams), count, threads)),
        "adam fp32": (28, lambda: adam(*state, grad, threads=threads, **settings)),
        "adam bf16 in and out": (28, lambda: adam(*state, grad16, out=out16, threads=threads, **settings)),
        "adam fp16 in and out": (28, lambda: adam(*state, half, out=out_half, threads=threads, **settings)),
        "torch fused AdamW": (28, fused.step),
        "tree_sum of 4, bf16": (10, lambda: tree_sum(out16, parts, threads=threads)),
        "square_partials fp32": (4, lambda: square_partials(grad, threads=threads)),
    }


def main() -> None:
    """Measure, print a table, and write it with machine and date when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=20e6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count = int(options.elements) // (1024 * options.threads) * 1024 * options.threads
    with tempfile.TemporaryDirectory() as folder:
        calls = candidates(count, options.threads, build_bare_loop(Path(folder)))
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(options.rounds + 1):
            for name, (_, call) in calls.items():
                begin = time.perf_counter()
                call()
                if turn:  # the first round touches the pages
                    seconds[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rows = {
        name: {"ms": 1e3 * t, "GB_per_second": calls[name][0] * count / t / 1e9, "time_of_4R3W": t / median["4R3W"]}
        for name, t in median.items()
    }
    print(f"{count} elements, {options.threads} threads, median of {options.rounds} rounds")
    for name, row in rows.items():
        print(f"{name:22} {row['ms']:9.2f} ms {row['GB_per_second']:7.1f} GB/s {row['time_of_4R3W']:6.2f} x 4R3W")
    print(f"adam fp32 takes {median['adam fp32'] / median['torch fused AdamW']:.2f} of the time of torch fused AdamW")
    if options.json:
        header = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps({**header, "threads": options.threads, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
