"""Optimizers for host memory beside torch's, and beside a loop that only moves the same bytes.

    python benchmarks/micro/cpu_adam.py [--threads 1 2] [--elements 100e6] [--rounds 7] [--output FILE]

Three comparisons, each for every number of threads; the candidates of one run in turn in every round, and the
ratios are those of the medians:

    large   one fp32 tensor: CPUAdam with the bare loop, and with torch's AdamW, fused and foreach
    small   2,000 tensors of 1,000 elements: CPUAdam with torch's fused AdamW, both with gradients that stay
            and with new ones at every step
    mixed   bf16 gradients unscaled and clipped, bf16 weights out: one call with the sequence of torch calls

The bare loop reads four and writes three fp32 streams in place (4R3W), with next to no arithmetic: it is the
most that memory allows. It is compiled on the fly, with the compiler named in CC or `cc`.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mpispeed.optim import CPUAdam
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.host_rule import run_kernel

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
GOALS = {
    "large: time of 4R3W / time of CPUAdam": 0.95,
    "large: time of fused / time of CPUAdam": 0.97,
    "large: time of foreach / time of CPUAdam": 4.5,
    "small: time of fused / time of CPUAdam": 5.0,
    "small, new gradients: time of fused / time of CPUAdam": 5.0,
    "mixed: time of torch calls / time of CPUAdam": 1.5,
}


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


def in_turn(calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Median seconds of each call; the first of a pair prepares and is not timed, nor is the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, (prepare, call) in calls.items():
            prepare()
            begin = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def nothing() -> None:
    """No preparation."""


def made(optimizer: Any, count: int, grad: torch.Tensor, **hyper: Any) -> Any:
    """An optimizer over one parameter that has this gradient."""
    param = torch.nn.Parameter(torch.rand(count))
    param.grad = grad
    return optimizer([param], lr=1e-3, weight_decay=0.01, **hyper)


def large(count: int, threads: int, rounds: int, bare: Callable[..., None]) -> dict[str, float]:
    """One large fp32 tensor."""
    grad = torch.rand(count).mul_(1e-3)
    streams = [torch.zeros(count) for _ in range(3)] + [grad]
    ours = made(CPUAdam, count, grad)
    fused, foreach = (made(torch.optim.AdamW, count, grad, **{kind: True}) for kind in ("fused", "foreach"))
    calls = {
        "4R3W": lambda: bare(*(x.data_ptr() for x in streams), count, threads),
        "CPUAdam": ours.step,
        "torch fused": fused.step,
        "torch foreach": foreach.step,
    }
    return in_turn({name: (nothing, call) for name, call in calls.items()}, rounds)


def small(tensors: int, elements: int, rounds: int) -> dict[str, float]:
    """Many small tensors, with gradients that stay and with new ones."""
    params = [torch.nn.Parameter(torch.rand(elements)) for _ in range(tensors)]

    def renew() -> None:
        for param in params:
            param.grad = torch.full((elements,), 1e-3)

    ours, fused = CPUAdam(params), torch.optim.AdamW(params, fused=True)
    renew()
    stay = in_turn({"CPUAdam": (nothing, ours.step), "torch fused": (nothing, fused.step)}, 3 * rounds)
    new = in_turn({"CPUAdam": (renew, ours.step), "torch fused": (renew, fused.step)}, 3 * rounds)
    return {**stay, **{f"{name}, new gradients": seconds for name, seconds in new.items()}}


def mixed(count: int, rounds: int) -> dict[str, float]:
    """Gradients in bf16 with a loss scale of 1024 and a clip factor of 0.5, weights in bf16."""
    grad16 = torch.rand(count).mul_(1e-3).bfloat16()
    weights = torch.empty(count, dtype=torch.bfloat16)
    master, scale = torch.nn.Parameter(torch.rand(count)), 0.5 / 1024
    fused = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.01, fused=True)

    def torch_calls() -> None:
        master.grad = grad16.float().mul_(scale)
        fused.step()
        weights.copy_(master.detach())

    param = torch.nn.Parameter(torch.rand(count))
    # the type of a gradient may differ from that of its parameter only by leave
    if hasattr(param, "grad_dtype"):
        param.grad_dtype = torch.bfloat16
        param.grad = grad16
        ours = CPUAdam([param], lr=1e-3, weight_decay=0.01)
        call: Callable[[], Any] = partial(ours.step, lowp_out=[weights], grad_scale=scale)
    else:
        call = kernel_call(param.detach(), grad16, weights, scale)
    return in_turn({"CPUAdam": (nothing, call), "torch calls": (nothing, torch_calls)}, rounds)


def kernel_call(master: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, scale: float) -> Callable[[], Any]:
    """The same by the function under CPUAdam, where torch ties the dtype of a gradient to its parameter."""
    states = [torch.zeros_like(master) for _ in range(2)]
    hyper: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    terms = adam_terms(step=5, decoupled=True, grad_scale=scale, **hyper)
    threads = torch.get_num_threads()
    return lambda: run_kernel("adam", master, (states[0], states[1]), grad, out, terms, threads)


def measure(options: argparse.Namespace, threads: int, bare: Callable[..., None]) -> dict[str, Any]:
    """Milliseconds and ratios for one number of threads."""
    torch.set_num_threads(threads)
    step = 1024 * threads
    count = max(int(options.elements) // step, 1) * step
    found = {
        "large": large(count, threads, options.rounds, bare),
        "small": small(options.tensors, options.tensor_elements, options.rounds),
        "mixed": mixed(count, options.rounds),
    }
    one, many, both = found["large"], found["small"], found["mixed"]
    ratios = [
        one["4R3W"] / one["CPUAdam"],
        one["torch fused"] / one["CPUAdam"],
        one["torch foreach"] / one["CPUAdam"],
        many["torch fused"] / many["CPUAdam"],
        many["torch fused, new gradients"] / many["CPUAdam, new gradients"],
        both["torch calls"] / both["CPUAdam"],
    ]
    milliseconds = {part: {name: 1e3 * seconds for name, seconds in rows.items()} for part, rows in found.items()}
    return {"elements": count, "milliseconds": milliseconds, "ratios": dict(zip(GOALS, ratios, strict=True))}


def show(threads: int, result: dict[str, Any]) -> None:
    """Print one table."""
    print(f"{threads} threads, {result['elements']} elements")
    for part, rows in result["milliseconds"].items():
        for name, value in rows.items():
            print(f"  {part:6} {name:28} {value:10.2f} ms")
    for name, ratio in result["ratios"].items():
        print(f"  {name:56} {ratio:6.2f}   goal {GOALS[name]}")


def main() -> None:
    """Measure, print tables, and write them with machine and date when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--elements", type=float, default=100e6)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--tensor-elements", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        bare = build_bare_loop(Path(folder))
        for threads in options.threads:
            results[str(threads)] = measure(options, threads, bare)
            show(threads, results[str(threads)])
    if options.output:
        header = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine()}
        header["torch"] = torch.__version__
        options.output.write_text(json.dumps({**header, "goals": GOALS, "threads": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
