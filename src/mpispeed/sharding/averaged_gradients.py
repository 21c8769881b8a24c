"""`optimizer.averaged_gradients`: this rank's part of the summed gradients, where only gradients or states are cut."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mpispeed.sharding.grads import GradStore, is_summed

if TYPE_CHECKING:
    import torch


class AveragedGradients(Mapping[int, "list[torch.Tensor]"]):
    """Parameter group -> gradients of its parameters of which this rank updates elements, in the order of the units.

    A gradient has the shape of its parameter if all of it belongs to this rank, else it is the flat range that does. It
    is what the step will use before it unscales and clips, and what is written into it has its effect; gradients in
    swap files are copies. Without gradients whose sums over ranks are due, before a backward pass, in the middle of an
    accumulation at stage 1 and after the step, there is no key. The gradients are held weakly.

    Source: the attribute of this name of DeepSpeed's optimizer for ZeRO 1 and 2.
    """

    def __init__(self, grads: GradStore, groups: int) -> None:
        """Args: `groups` is the number of parameter groups."""
        self._grads, self._groups = weakref.ref(grads), groups

    def __getitem__(self, group: int) -> list[torch.Tensor]:
        """Waits for sums that were started.

        Collective over: the data axis, where gradients are in swap files.
        """
        grads = self._summed()
        if grads is None or group not in range(self._groups):
            raise KeyError(group)
        grads.pause()
        grads.shards.drain()
        found = []
        for unit in grads.table.units:
            span, values = grads.shards.target_span(unit), None
            for entry, common in unit.layout.overlaps(span):
                if entry.group == group and common.numel:
                    values = grads.shards.reduced(unit) if values is None else values
                    part = values[common.shifted(-span.start).slice]
                    found.append(part.view(entry.shape) if common == entry.span else part)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._groups if self._summed() is not None else 0))

    def __len__(self) -> int:
        return self._groups if self._summed() is not None else 0

    def _summed(self) -> GradStore | None:
        grads = self._grads()
        return grads if grads is not None and is_summed(grads) else None
