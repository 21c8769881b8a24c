"""A layer of experts on a GPU: rows on their way beside a copy, and the layer by grouped products and by a loop.

    python benchmarks/gpu/experts.py

SwiGLU experts in bf16, 16384 tokens of 1024 elements. Rows count the work of the device only; a layer is timed from an
idle device to an idle device, forward and backward, so that what the host takes counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import copy_bandwidth, interleaved, need_gpu, parser_of, write_results

from mpispeed.native.permute import combine_rows, dot_rows, spread_rows
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts
from mpispeed.nn.expert.sorted_plan import sort_choices

TOKENS, HIDDEN, TARGET = 16384, 1024, 0.85
SHAPES = ((8, 2, 2048), (64, 6, 512))
"""Experts, choices of a token, width inside of an expert."""
PASSES = 10  # timed at a time


def rows_of(layer: RoutedExperts, x: torch.Tensor, bandwidth: float, rounds: int) -> list[dict[str, Any]]:
    """Seconds of each pass over rows, and the bandwidth it reaches of that of a copy."""
    routing = layer.gate(x)
    plan = sort_choices(routing.experts, routing.kept, layer.experts.num_experts)
    rows, weights = x.new_empty((int(plan.counts.sum()), HIDDEN)), routing.weights.detach()
    out, products = torch.empty_like(x), torch.empty_like(weights)
    both = float(x.nbytes + rows.nbytes)
    work: dict[str, tuple[float, Callable[[], object]]] = {
        "spread": (both, lambda: spread_rows(rows, x, plan.places)),
        "spread with weights": (both, lambda: spread_rows(rows, x, plan.places, weights)),
        "combine": (both, lambda: combine_rows(out, rows, plan.places, weights)),
        "products": (both, lambda: dot_rows(products, x, rows, plan.places)),
    }
    seconds = interleaved({name: call for name, (_, call) in work.items()}, rounds, is_device_only=True)
    return [
        {
            "name": name,
            "seconds": seconds[name],
            "fraction_of_copy": moved / seconds[name] / bandwidth,
            "target": TARGET,
        }
        for name, (moved, _) in work.items()
    ]


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call, of several from an idle device to an idle device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(PASSES):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / PASSES


def measure(experts: int, k: int, inner: int, bandwidth: float, rounds: int) -> dict[str, Any]:
    """One shape."""
    layer = RoutedExperts(Router(HIDDEN, experts, RouterOptions(k=k)), SwiGLUExperts(HIDDEN, inner, experts))
    layer.to("cuda", torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16().requires_grad_()
    grad, found = torch.randn_like(x), dict[str, list[float]]()
    for turn in range(rounds + 2):
        for how in ("grouped", "loop"):
            layer.experts.compute = how
            taken = timed(lambda: torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], grad))
            if turn > 1:
                found.setdefault(how, []).append(taken)
    milliseconds = {how: statistics.median(each) for how, each in found.items()}
    products = 3 * 2 * TOKENS * k * 3 * HIDDEN * inner  # forward, and twice as many backward
    return {
        "experts": experts, "k": k, "inner": inner, "milliseconds": milliseconds,
        "tflops_of_products": products / milliseconds["grouped"] / 1e9,
        "rows": rows_of(layer, x.detach(), bandwidth, rounds),
    }  # fmt: skip


def main() -> None:
    """Measure all shapes and write the record."""
    args = parser_of(__doc__).parse_args()
    need_gpu()
    bandwidth, records = copy_bandwidth(), []
    for shape in SHAPES:
        records.append(measure(*shape, bandwidth, args.rounds))
        print(records[-1])
    found = {"copy_bytes_per_second": bandwidth, "layers": records}
    print(write_results("experts", found, options=vars(args), path=args.json))


if __name__ == "__main__":
    main()
