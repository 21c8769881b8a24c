"""Checks and divisors for passes over flat tensors, whose addresses go to compiled code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

# numbers of dtypes in the compiled loops
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}

# elements a reference works on at a time, so that its temporaries stay small
REFERENCE_SPAN = 1 << 18


def check_tensors(where: str, tensors: Mapping[str, Tensor], *, device: torch.device | None = None) -> int:
    """Check that all tensors are contiguous, on the host and of one length; gives the length in elements.

    With `device` they have to be there instead of on the host.

    Raises:
        ValueError: one of them is not; `where` and its name are in the message.
    """
    length = -1
    first = ""
    for name, x in tensors.items():
        if device is not None and x.is_meta:
            msg = f"{where}: {name} is on meta, where nothing is kept; give a tensor with data"
            raise ValueError(msg)
        if device is not None and x.device != device:
            msg = f"{where}: {name} is on {x.device}, but another tensor is on {device}; put all on one device"
            raise ValueError(msg)
        if device is None and x.device.type != "cpu":
            msg = f"{where}: {name} is on {x.device}; this pass works on host memory, copy it to the CPU first"
            raise ValueError(msg)
        if not x.is_contiguous():
            msg = f"{where}: {name} has strides {x.stride()} for shape {tuple(x.shape)}; pass a contiguous tensor"
            raise ValueError(msg)
        if length < 0:
            length, first = x.numel(), name
        elif x.numel() != length:
            msg = f"{where}: {name} has {x.numel()} elements but {first} has {length}; they must be equal"
            raise ValueError(msg)
    return length


def check_threads(where: str, threads: int) -> None:
    """Check a thread count.

    Raises:
        ValueError: it is below 1.
    """
    if threads < 1:
        msg = f"{where}: threads is {threads}; pass 1 or more"
        raise ValueError(msg)


def _byte_range(x: Tensor) -> tuple[int, int]:
    begin = x.data_ptr()
    return begin, begin + x.numel() * x.element_size()


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """True if both have the same address, dtype and length."""
    return a.dtype == b.dtype and _byte_range(a) == _byte_range(b)


def overlaps(a: Tensor, b: Tensor) -> bool:
    """True if the two contiguous tensors share at least one byte."""
    a_begin, a_end = _byte_range(a)
    b_begin, b_end = _byte_range(b)
    return max(a_begin, b_begin) < min(a_end, b_end)


def any_overlap(tensors: Iterable[Tensor]) -> bool:
    """True if any two of the contiguous tensors share memory; empty ones share nothing."""
    ranges = sorted(_byte_range(x) for x in tensors if x.numel())
    return any(b_begin < a_end for (_, a_end), (b_begin, _) in pairwise(ranges))


def divisor(value: float, of: Tensor) -> Tensor:
    """`value` to divide the tensor `of` by, as a tensor of its dtype and device.

    CUDA multiplies by the rounded reciprocal of a number, and of a tensor of one element on the host: the quotient is
    not that of the host.
    """
    return torch.full((), value, dtype=of.dtype, device=of.device)
