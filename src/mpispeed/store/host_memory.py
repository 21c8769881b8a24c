"""Memory of the host for what is long: mapped for itself, so that the system gets it back when it is let go.

The heap of the C library keeps what was freed between two pieces in use, and states that live for the whole run lie
between the temporaries of a step. It also gives every piece small pages, which cost more than a copy when they are new.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch

from mpispeed.base.units import format_bytes

LEAST_MAPPED_BYTES = 1 << 20
"""What is shorter comes from the heap."""

_HUGE_PAGE_BYTES = 2 << 20
_LEAST_ALIGNED_BYTES = 32 * _HUGE_PAGE_BYTES
"""From here on addresses for the alignment are less than a thirtieth of what limits of the address space count."""


def empty(numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> torch.Tensor:
    """Memory with unspecified content. Shapes: [numel].

    `is_brief`: it is let go soon, so it may take addresses beside its own to begin at a huge page.

    Raises:
        MemoryError: the system has none left for this process.
    """
    return _mapped(numel, dtype, is_brief) if _is_long(numel, dtype) else torch.empty(numel, dtype=dtype)


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of zeros; long ones take none before they are written. Shapes: [numel].

    Raises:
        MemoryError: the system has none left for this process.
    """
    return _mapped(numel, dtype) if _is_long(numel, dtype) else torch.zeros(numel, dtype=dtype)


def copied(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in `dtype`; on the device of `values`, if they are not on the host. Shapes: values [numel].

    Raises:
        MemoryError: the system has none left for this process.
    """
    if values.device.type != "cpu":
        return values.to(dtype, copy=True)
    return empty(values.numel(), dtype).copy_(values)


def trim() -> None:
    """Give what the heap does not use back to the system, where the C library can."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(ctypes.c_size_t(0))


def _is_long(numel: int, dtype: torch.dtype) -> bool:
    return numel * dtype.itemsize >= LEAST_MAPPED_BYTES


def _mapped(numel: int, dtype: torch.dtype, is_brief: bool = False) -> torch.Tensor:
    size = numel * dtype.itemsize
    spare = _HUGE_PAGE_BYTES if is_brief or size >= _LEAST_ALIGNED_BYTES else 0
    try:
        memory = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(_refusal(size, error)) from None
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    first = -address % _HUGE_PAGE_BYTES
    start = first if spare else 0
    whole = start + size - (address + start + size) % _HUGE_PAGE_BYTES - first  # the rest would be taken whole
    if whole > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages, or no mapping left to be cut; where they are switched off, all goes well.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, first, whole)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)


def _refusal(size: int, error: Exception) -> str:
    """Why the system maps no more, as far as it can be seen."""
    why = getattr(error, "strerror", None) or str(error)
    found = f"{format_bytes(size)} of host memory cannot be mapped: {why}"
    with contextlib.suppress(OSError, ValueError), Path("/proc/self/maps").open("rb") as maps:
        # In short pieces, which the heap has without another mapping.
        count = sum(piece.count(b"\n") for piece in iter(lambda: maps.read(1 << 14), b""))
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        if count >= most - 8:
            return f"{found}; the process has {count} mappings of {most} (sysctl vm.max_map_count), raise that"
    return (
        f"{found}; raise the limit of the job's memory (ulimit -v, vm.overcommit_memory), start fewer ranks on this "
        "node, or set zero_optimization.offload_optimizer to device nvme"
    )
