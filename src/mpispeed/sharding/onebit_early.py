"""1-bit exchanges beside the backward pass: a unit is compressed as soon as its gradients are there.

The multiplier has to be known before the norm, so there is no clipping and no loss scale. The agreed values replace the
gradients until the step; if the step is skipped, momenta stay as they were and errors are forgotten, because they
belong to dropped values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mpispeed.optim.exchange import Exchange
from mpispeed.sharding.onebit_compressor import Compressor

if TYPE_CHECKING:
    import torch

    from mpispeed.store.layout import Unit


class Codes(Protocol):
    """Agrees on units one by one; `onebit_exchange.OneBitExchange` is one."""

    def kind(self, step: int) -> Exchange:
        """The quantity that is exchanged for update number `step`."""

    def code(self, unit: Unit, step: int, multiplier: float, grad: torch.Tensor, compressor: Compressor) -> None:
        """Put what ranks agree on in place of a unit's gradients."""

    def clear_errors(self) -> None:
        """Forget all errors of compression."""

    @property
    def has_momenta(self) -> bool:
        """True once the data that compressed momenta need from other ranks are here."""


class EarlyOneBit:
    """Compresses units on the channel of gradients, each at most once for an update."""

    def __init__(self, onebit: Codes, compressor: Compressor) -> None:
        """Args: `compressor` works on the channel of gradients."""
        self._onebit, self._compressor = onebit, compressor
        self._step = 0
        self._done: set[int] = set()

    def begin(self, step: int) -> None:
        """Prepare for update number `step`. Local."""
        self.end(is_applied=False)
        self._step = step

    def __call__(self, unit: Unit, grad: torch.Tensor) -> None:
        """Agree on a unit, in place of its gradients; on the channel's thread.

        Collective over: the data axis, in the order of the channel.
        """
        self._onebit.code(unit, self._step, 1.0, grad, self._compressor)
        self._done.add(unit.index)

    @property
    def is_pending(self) -> bool:
        """True if units were compressed for an update that has not taken them."""
        return bool(self._done)

    def end(self, *, is_applied: bool) -> None:
        """The update has taken the compressed units, or never will: then their errors are forgotten. Local."""
        if self._done and not is_applied:
            self._onebit.clear_errors()
        self._done.clear()

    def is_ready(self) -> bool:
        """True if units can be compressed early now. Local, the same on all ranks.

        False for the first compressed momentum, and for one after states were set: their data from other ranks come
        late.
        """
        kind = self._onebit.kind(self._step)
        return kind is Exchange.CODED_GRADIENT or (kind is Exchange.MOMENTUM and self._onebit.has_momenta)

    def takes(self, unit: Unit) -> bool:
        """False for a unit whose gradients may have to be summed over other axes first."""
        return not unit.states.copies

    def has(self, unit: Unit) -> bool:
        """True if the unit was compressed for the coming update."""
        return unit.index in self._done
