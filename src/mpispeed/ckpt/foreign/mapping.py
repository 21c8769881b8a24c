"""Memory-mapped files: bytes are read when they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


def map_file(path: Path) -> torch.Tensor:
    """The bytes of a file, mapped copy-on-write."""
    if not path.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.memmap(path, np.uint8, "c"))


def is_aligned(part: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if the bytes are aligned for elements of `dtype`."""
    return part.storage_offset() % dtype.itemsize == 0 and part.data_ptr() % dtype.itemsize == 0


def typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as elements; unaligned ones are copied.

    Raises:
        ValueError: a bool is stored as another byte than 0 or 1.
    """
    if dtype == torch.bool and part.numel() and int(part.max()) > 1:
        msg = f"a truth value is stored as {int(part.max())}, not as 0 or 1"
        raise ValueError(msg)
    if not is_aligned(part, dtype):
        part = part.clone()
    return part.view(dtype)
