"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

from mpispeed.base.cgroups import kib_to_bytes, read_fields

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Resident memory now; 0 where the kernel does not tell."""
    return kib_to_bytes(dict(read_fields(_STATUS)).get("VmRSS")) or 0


def peak_bytes() -> int:
    """The most resident memory since `forget_peak`; since the start of the process where that is not possible."""
    found = kib_to_bytes(dict(read_fields(_STATUS)).get("VmHWM"))
    return found or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Let the peak count from now on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Give memory that nobody uses back to the system, so that what is resident is in use."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Give free memory of the allocator back to the system, where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
