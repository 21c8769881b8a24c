"""Fused optimizers and the global norm beside a copy on the device and beside torch.

    python benchmarks/gpu/optim.py [--elements 1e9] [--rounds 20] [--json FILE]

    adam        one fp32 tensor: FusedAdam and torch's AdamW(fused=True), 28 bytes a parameter
    mixed       fp32 masters and moments, bf16 gradients in, bf16 weights out, unscaled on the way: 28 bytes a parameter
    small       2,000 tensors of 10,000 elements: FusedAdam and torch's AdamW(fused=True), with what the host takes
    lamb        FusedLamb, three launches: 40 bytes a parameter
    lion        FusedLion: 20 bytes a parameter
    adagrad     FusedAdagrad: 20 bytes a parameter
    norm        sum of squares with finite check of fp32 and bf16: 4 and 2 bytes; and torch's norm

Fractions are of the bandwidth of a copy (read and written bytes) measured in the same run. Elements are fewer where the
memory of the device is too small.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import nn

from mpispeed.native.device_norm import norm_and_finite
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.multi_tensor_host import Row
from mpispeed.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedLion
from mpispeed.optim.adam import adam_terms

GOALS = {
    "adam: fraction of the copy": 0.90,
    "adam: time of torch / time of ours": 1.0,
    "mixed: fraction of the copy": 0.90,
    "lamb: fraction of the copy": 0.85,
    "lion: fraction of the copy": 0.85,
    "adagrad: fraction of the copy": 0.85,
    "norm fp32: fraction of the copy": 0.85,
    "norm bf16: fraction of the copy": 0.85,
}
BYTES = {"adam": 28, "mixed": 28, "lamb": 40, "lion": 20, "adagrad": 20, "norm fp32": 4, "norm bf16": 2}
HYPER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}

Calls = dict[str, Callable[[], object]]


def made(optimizer: Any, count: int, grad: torch.Tensor, **more: Any) -> Any:
    """An optimizer over one parameter that has this gradient."""
    param = nn.Parameter(torch.rand(count, device="cuda"))
    param.grad = grad
    return optimizer([param], **HYPER, **more)


def adam(count: int) -> Calls:
    """Ours and torch's on one tensor each, with one gradient."""
    grad = torch.rand(count, device="cuda").mul_(1e-3)
    ours, theirs = made(FusedAdam, count, grad), made(torch.optim.AdamW, count, grad, fused=True)
    return {"ours": ours.step, "torch": theirs.step}


def one(optimizer: Any) -> Callable[[int], Calls]:
    """Ours alone: torch has no such kernel on a device."""
    return lambda count: {"ours": made(optimizer, count, torch.rand(count, device="cuda")).step}


def mixed(count: int) -> Calls:
    """One table, as the engine and `step(lowp_out=...)` use it."""
    master, first, second = (torch.zeros(count, device="cuda") for _ in range(3))
    grad, out = (torch.rand(count, device="cuda").to(torch.bfloat16) for _ in range(2))
    table = DeviceTable("adam", [Row(master, (first, second), grad, out)])
    terms = adam_terms(step=5, betas=(0.9, 0.999), eps=1e-8, decoupled=True, grad_scale=1 / 1024, **HYPER)

    def update() -> None:
        table.take([master], [grad], [out])
        table.run([terms])

    return {"ours": update}


def small(_: int) -> Calls:
    """Many small tensors."""
    found: Calls = {}
    for name, optimizer, more in (("ours", FusedAdam, {}), ("torch", torch.optim.AdamW, {"fused": True})):
        params = [nn.Parameter(torch.rand(10_000, device="cuda")) for _ in range(2000)]
        for param in params:
            param.grad = torch.rand_like(param)
        found[name] = optimizer(params, **HYPER, **more).step
    return found


def norm(dtype: torch.dtype) -> Callable[[int], Calls]:
    """Ours, and torch's norm, which does not say whether all elements are finite."""

    def calls(count: int) -> Calls:
        x = torch.rand(count, device="cuda").to(dtype)
        return {"ours": lambda: norm_and_finite([x]), "torch": lambda: torch.linalg.vector_norm(x)}

    return calls


CASES: dict[str, Callable[[int], Calls]] = {
    "adam": adam,
    "mixed": mixed,
    "small": small,
    "lamb": one(FusedLamb),
    "lion": one(FusedLion),
    "adagrad": one(FusedAdagrad),
    "norm fp32": norm(torch.float32),
    "norm bf16": norm(torch.bfloat16),
}


def main() -> None:
    """Measure, print a table and write the record."""
    parser = timing.parser_of(__doc__)
    parser.add_argument("--elements", type=float, default=1e9)
    options = parser.parse_args()
    timing.need_gpu()
    # The largest case has four fp32 tensors of ours, three of torch, and what they allocate to begin.
    count = min(int(options.elements), torch.cuda.mem_get_info()[0] // 48)
    copy = timing.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s, {count} elements")
    results: dict[str, Any] = {"copy_bytes_per_second": copy, "elements": count}
    for name, make in CASES.items():
        seconds = timing.interleaved(make(count), options.rounds)
        row: dict[str, float] = {f"{who}_ms": 1e3 * value for who, value in seconds.items()}
        if name in BYTES:
            row["fraction of the copy"] = BYTES[name] * count / seconds["ours"] / copy
        if "torch" in seconds:
            row["time of torch / time of ours"] = seconds["torch"] / seconds["ours"]
        results[name] = row
        print(f"{name:12}" + "".join(f"  {key} {value:.4g}" for key, value in row.items()))
        gc.collect()
        torch.cuda.empty_cache()
    for goal, wanted in GOALS.items():
        case, what = goal.split(": ")
        print(f"{goal:44} {results[case][what]:6.3f}   goal {wanted}")
    options.goals = GOALS
    print(timing.write_results("optim", results, options=vars(options), path=options.json))


if __name__ == "__main__":
    main()
