"""Host memory in whole pages, for O_DIRECT and for transfers of a GPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
from functools import cache

import torch

from mpispeed.base import device as devices
from mpispeed.base.log import once
from mpispeed.native.block_probe import ALIGNMENT

_logger = logging.getLogger(__name__)


def aligned(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """A tensor of `nbytes` bytes (uint8) at the start of a page, in whole pages of its own, all zeros.

    The memory is freed with the last tensor that views it. `pin`: page-locked where this process computes on a device,
    or torch sees a GPU. If torch cannot pin it, that is logged once.

    Raises:
        ValueError: a negative length.
        MemoryError: there is no memory.
    """
    if nbytes < 0:
        msg = f"aligned: {nbytes} bytes; a length cannot be negative"
        raise ValueError(msg)
    if pin and _has_device():
        try:
            spare = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            start = -spare.data_ptr() % ALIGNMENT
            return spare[start : start + nbytes]
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            once(_logger, logging.WARNING, f"host memory is not pinned, copies to a GPU are slower: {why}")
    pages = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, pages, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        msg = f"aligned: no memory for {nbytes} bytes: {error.strerror}"
        raise MemoryError(msg) from None
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def lock_memory(memory: torch.Tensor) -> str:
    """Keep the pages of a host tensor in memory (mlock); "" or the reason why they are not."""
    if memory.numel() == 0 or (_has_device() and memory.is_pinned()):
        return ""
    if _libc().mlock(memory.data_ptr(), memory.nbytes) == 0:
        return ""
    code = ctypes.get_errno()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return f"mlock: {os.strerror(code)}; RLIMIT_MEMLOCK is {limit} bytes, raise it with `ulimit -l`"


def unlock_memory(memory: torch.Tensor) -> None:
    """Take back `lock_memory`; the memory itself stays."""
    if memory.numel() and not (_has_device() and memory.is_pinned()):
        _libc().munlock(memory.data_ptr(), memory.nbytes)


def _has_device() -> bool:
    return devices.used() is not None or torch.cuda.is_available()


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    for function in (library.mlock, library.munlock):
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
