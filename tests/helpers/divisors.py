"""Finds divisions by a number, whose results on CUDA are not those of the host.

For a divisor that the host has, a Python number or a tensor of one element there, torch's CUDA kernels multiply by its
rounded reciprocal. The quotient is then off by one bit now and then; the CPU divides.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DIVISIONS = ("div", "div_", "divide", "divide_", "true_divide", "true_divide_", "_foreach_div", "_foreach_div_")


class DivisionByNumber(Exception):
    """What ran inside of `TensorDivisors` divides a tensor by a number."""


class TensorDivisors(TorchDispatchMode):
    """Inside of it a tensor on a device may only be divided by tensors there. `seen` counts divisions by tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in _DIVISIONS:
            self._check(func, *args[:2])
        return func(*args, **(kwargs or {}))

    def _check(self, func, dividend, divisor):
        for x in dividend if isinstance(dividend, (list, tuple)) else [dividend]:
            if not isinstance(divisor, torch.Tensor) or divisor.device != x.device:
                msg = f"{func} of {tuple(x.shape)} on {x.device} by {divisor!r}; divide by a tensor on the device"
                raise DivisionByNumber(msg)
        self.seen += 1
