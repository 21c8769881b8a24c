"""Places of tensors in memory. Tools that read files have no torch, so it is not imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def address(x: torch.Tensor) -> int:
    """The place of its first byte; without data a number that keeps tensors of different storages apart."""
    return x.data_ptr() if not x.is_meta else (x.untyped_storage()._cdata << 64) + x.data_ptr()
