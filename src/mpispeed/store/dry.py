"""Stored tensors without data and files, for a dry run: whatever is kept somewhere is on torch's meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.store.stored_tensor import Carried, MemoryLease, SwappedTensor
from mpispeed.store.tiers import Tiers

if TYPE_CHECKING:
    from mpispeed.store.tiers import SwapPlan

META = torch.device("meta")


class DrySwappedTensor(SwappedTensor):
    """A tensor that a run would keep in a swap file."""

    __slots__ = ()

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype

    def get(self) -> torch.Tensor:
        """A copy, on meta."""
        return torch.empty(self.numel, dtype=self.dtype, device=META)

    def start_get(self, out: torch.Tensor) -> Carried:
        """A read that has ended."""
        del out
        return Carried(None, is_write=False)

    def start_put(self, values: torch.Tensor) -> Carried:
        """A write that has ended."""
        del values
        return Carried(None, is_write=True)

    def lend(self, start: int, stop: int, *, reads: bool = True) -> MemoryLease:  # type: ignore[override]
        """The range of a copy."""
        del reads
        return MemoryLease(self.get()[start:stop])


class DryTiers(Tiers):
    """Makes stored tensors as `Tiers` does for a plan, without making files and buffers."""

    def __init__(self, plan: SwapPlan) -> None:
        super().__init__(device=META)
        self.plan, self.is_swapping = plan, bool(plan.tensors)

    def _swapped(self, kind: str, numel: int, dtype: torch.dtype) -> SwappedTensor:
        del kind
        return DrySwappedTensor(numel, dtype)
