"""The rate at which this rank's device multiplies matrices, measured: what utilisation is compared with."""

from __future__ import annotations

import time

import torch

SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Rows of the square matrices that are tried, one after the other."""

ENOUGH_SECONDS = 0.02
"""A product that takes so long is large enough."""

ROUNDS = 3


def measure_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of a product of two square matrices, the best of several sizes and rounds.

    With the threads that torch has here; ranks of one node that measure at the same time share it as they do in a run.
    Takes about a tenth of a second. Local.

    Args:
        dtype: of the matrices.
        device: where they are.
    """
    best = 0.0
    for size in SIZES:
        seconds = _seconds(size, dtype, device)
        best = max(best, 2 * size**3 / seconds)
        if seconds > ENOUGH_SECONDS:
            break
    return best


def _seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of the fastest of several products, after one that warms up."""
    with torch.no_grad():
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        out, found = torch.empty_like(left), []
        for _ in range(ROUNDS + 1):
            _settle(device)
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            _settle(device)
            found.append(time.perf_counter() - start)
    return min(found[1:])


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
