"""Memory of the host for what is long: mapped for itself, so that the system gets it back when it is let go.

The heap of the C library keeps what was freed between two pieces in use, and states that live for the whole run lie
between the temporaries of a step. It also gives every piece small pages, which cost more than a copy when they are new.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

LEAST_MAPPED_BYTES = 1 << 20
"""What is shorter comes from the heap."""

_HUGE_PAGE_BYTES = 2 << 20


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory with unspecified content. Shapes: [numel]."""
    return _mapped(numel, dtype) if _is_long(numel, dtype) else torch.empty(numel, dtype=dtype)


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of zeros; long ones take none before they are written. Shapes: [numel]."""
    return _mapped(numel, dtype) if _is_long(numel, dtype) else torch.zeros(numel, dtype=dtype)


def copied(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in `dtype`; on the device of `values`, if they are not on the host. Shapes: values [numel]."""
    if values.device.type != "cpu":
        return values.to(dtype, copy=True)
    return empty(values.numel(), dtype).copy_(values)


def trim() -> None:
    """Give what the heap does not use back to the system, where the C library can."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


def _is_long(numel: int, dtype: torch.dtype) -> bool:
    return numel * dtype.itemsize >= LEAST_MAPPED_BYTES


def _mapped(numel: int, dtype: torch.dtype) -> torch.Tensor:
    size = numel * dtype.itemsize
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
    whole = size - size % _HUGE_PAGE_BYTES  # a huge page at the end would be taken whole
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)
