"""Memory mapped by all ranks of a node."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from mpispeed.mesh.collectives.transport import Transport

MEMORY_FOLDER = "/dev/shm"


def share_memory(group: Transport, total_bytes: int) -> torch.Tensor | None:
    """Memory that all ranks have mapped, all zero; None on every rank if any of them cannot map it.

    Collective over: `group`, whose ranks are on one node.
    Shapes: [total_bytes], of bytes.
    """
    path, memory = "", None
    if group.rank == 0:
        path = _create(total_bytes)
    path = group.library_share(path, 0)
    if path:
        memory = _map(path, total_bytes)
    is_mapped = all(group.library_gather_objects(memory is not None))
    if path and group.rank == 0:
        Path(path).unlink(missing_ok=True)
    return memory if is_mapped else None


def _create(total_bytes: int) -> str:
    """A file with all its memory reserved, or "" if the node does not grant it."""
    try:
        number, path = tempfile.mkstemp(prefix="mpispeed-", dir=MEMORY_FOLDER)
    except OSError:
        return ""
    try:
        # Reserved now: memory that is missing later would be a bus error, not an exception.
        os.posix_fallocate(number, 0, total_bytes)
    except OSError:
        Path(path).unlink()
        return ""
    finally:
        os.close(number)
    return path


def _map(path: str, total_bytes: int) -> torch.Tensor | None:
    try:
        # Outside of inference mode, because it serves calls there too.
        with Path(path).open("r+b") as file, torch.inference_mode(False):
            return torch.frombuffer(mmap.mmap(file.fileno(), total_bytes), dtype=torch.uint8)
    except OSError:
        return None
