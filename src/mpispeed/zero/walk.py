"""Windows over this rank's masters, gradients and optimizer state: what an update rule sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpispeed.optim.rule import Window
from mpispeed.store.layout import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpispeed.store.layout import Entry
    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.grads import GradStore
    from mpispeed.zero.params import ParamStore


class StateStore:
    """Optimizer state of this rank: one flat tensor per slot and unit, cut as the masters are."""

    def __init__(self, table: Table, params: ParamStore, slots: Sequence[str]) -> None:
        self.slots = tuple(slots)
        self._tensors = [
            {slot: torch.zeros(params.span(unit).numel, dtype=params.dtypes(unit)[1]) for slot in slots}
            for unit in table.units
        ]

    def of(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Slot name -> flat tensor over the unit's master span."""
        return self._tensors[unit.index]

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        return sum(tensor.nbytes for slots in self._tensors for tensor in slots.values())


class Walker:
    """Yields the windows of one update, in unit order."""

    def __init__(self, params: ParamStore, grads: GradStore, state: StateStore, *, per_parameter: bool) -> None:
        """Args: `per_parameter` asks for one window per whole parameter; it needs whole masters."""
        self._params, self._grads, self._state = params, grads, state
        self._per_parameter = per_parameter and params.placement.is_whole

    def windows(self, groups: Sequence[dict[str, Any]], step: int) -> Iterator[Window]:
        """All windows of this rank for update number `step`."""
        for unit in self._params.table.units:
            yield from self.windows_of(unit, groups, step)

    def windows_of(self, unit: Unit, groups: Sequence[dict[str, Any]], step: int) -> Iterator[Window]:
        """The windows of one unit."""
        own = self._params.span(unit)
        for group, span, entry in self._ranges(unit):
            common = span.intersect(own)
            if common.numel:
                yield self._window(unit, own, group, common, groups[group], step, entry)

    def _ranges(self, unit: Unit) -> Iterator[tuple[int, Span, Entry | None]]:
        if self._per_parameter:
            for entry in unit.layout.entries:
                yield entry.group, entry.span, entry
        else:
            for group, span in unit.layout.group_spans():
                yield group, span, None

    def _window(
        self, unit: Unit, own: Span, index: int, span: Span, group: dict[str, Any], step: int, entry: Entry | None
    ) -> Window:
        local = span.shifted(-own.start).slice
        low = self._params.low_precision(unit)
        return Window(
            master=self._params.master(unit)[local],
            grad=self._grads.reduced(unit)[local],
            state={slot: tensor[local] for slot, tensor in self._state.of(unit).items()},
            group=group,
            step=step,
            out=None if low is None else low[local],
            key=(unit.index, index, span.start),
            shape=None if entry is None else entry.shape,
        )
