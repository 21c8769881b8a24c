"""Gradients of units where updates may exchange one bit per element: summed, left local, or compressed as they come.

Units can be compressed beside the backward pass, on the channel of gradients, if the multiplier is known before the
norm, so without clipping and loss scale. The agreed values replace the gradients until the step; if the step is
skipped, momenta stay as they were and errors are forgotten, because they belong to dropped values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mpispeed.base.errors import UsageError
from mpispeed.optim.exchange import Exchange

if TYPE_CHECKING:
    import torch

    from mpispeed.exchange.onebit.compressor import Compressor
    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.sharding.reducers import Reduction, SumGradients
    from mpispeed.store.layout import Unit

_CODED_ALREADY = (
    "a backward pass after the gradients of this step were coded: with overlap_comm a 1-bit optimizer takes one "
    "backward pass at an accumulation boundary; add the losses, or set zero_optimization.overlap_comm to false"
)


class Codes(Protocol):
    """Agrees on units one by one; `coder.UnitCoder` is one."""

    def kind(self, step: int) -> Exchange:
        """The quantity that is exchanged for update number `step`."""

    def code(self, unit: Unit, step: int, multiplier: float, grad: torch.Tensor, compressor: Compressor) -> None:
        """Put what ranks agree on in place of a unit's gradients."""

    def clear_errors(self) -> None:
        """Forget all errors of compression."""

    @property
    def has_momenta(self) -> bool:
        """True once the data that compressed momenta need from other ranks are here."""


class OneBitGradients:
    """The `sharding.grads.UnitExchange` of 1-bit optimizers; compresses each unit at most once for an update.

    Attributes:
        sums: sums of steps in full precision.
        is_beside: units may be compressed beside the backward pass.
    """

    keeps_buckets = False

    def __init__(self, onebit: Codes, sums: SumGradients, shards: GradShards, compressor: Compressor | None) -> None:
        """Args: `compressor` works on the channel of gradients; None: nothing is compressed beside backward."""
        self._onebit, self.sums, self._shards, self._compressor = onebit, sums, shards, compressor
        self.is_beside = compressor is not None
        self._step = 0
        self._is_coding = False  # in the backward pass that was begun last
        self._has_several = False  # several backward passes were made over gradients that had been taken
        self._done: set[int] = set()

    def begin(self, step: int) -> None:
        """Prepare for update number `step`. Local."""
        self._shards.is_local = self._onebit.kind(step) is not Exchange.GRADIENT
        self._is_coding = False
        self.end(is_applied=False)
        self._step = step

    @property
    def local_grads(self) -> bool:
        """True in steps that are not in full precision."""
        return self._shards.is_local

    @property
    def takes_units(self) -> bool:
        """True if units are summed or compressed in the backward pass that was begun last."""
        return self._is_coding or not self._shards.is_local

    def begin_backward(self, *, is_again: bool) -> None:
        """Decide if this backward pass compresses units as they come.

        Not in a second pass over the same gradients, nor ever after a script has made such a pass.

        Raises:
            UsageError: units were compressed already, and no earlier pass has shown that there are several.
        """
        if is_again and self._is_coding:
            raise UsageError(_CODED_ALREADY)
        self._has_several = self._has_several or is_again
        self._is_coding = self._shards.is_local and not self._has_several and self.is_ready()

    def is_ready(self) -> bool:
        """True if units can be compressed beside the backward pass now. Local, the same on all ranks.

        False for the first compressed momentum, and for one after states were set: their data from other ranks come
        late.
        """
        kind = self._onebit.kind(self._step)
        is_possible = kind is Exchange.CODED_GRADIENT or (kind is Exchange.MOMENTUM and self._onebit.has_momenta)
        return self.is_beside and is_possible

    def take(self, unit: Unit, reduction: Reduction, *, squares: bool) -> None:
        """Sum a unit, or agree on it in place of its local gradients; on the channel's thread.

        Units whose gradients may have to be summed over other axes first are compressed later.

        Collective over: the data axis, in the order of the channel.
        """
        values = reduction.bucket
        if not self._is_coding or self._compressor is None or values is None:
            self.sums.take(unit, reduction, squares=squares)
        elif not unit.states.copies:
            self._shards.square(unit, values)
            self._onebit.code(unit, self._step, 1.0, values, self._compressor)
            self._done.add(unit.index)

    def has_taken(self, unit: Unit) -> bool:
        """True if the unit was compressed for the coming update."""
        return unit.index in self._done

    @property
    def is_pending(self) -> bool:
        """True if units were compressed for an update that has not taken them."""
        return bool(self._done)

    def end(self, *, is_applied: bool) -> None:
        """The update has taken the compressed units, or never will: then their errors are forgotten. Local."""
        if self._done and not is_applied:
            self._onebit.clear_errors()
        self._done.clear()

    def clear(self) -> None:
        """Forget gradients, and errors of units that no update has taken."""
        self.sums.clear()
        self.end(is_applied=False)

    def rescale(self, factor: float, *, is_overflow: bool) -> None:
        """As in `UnitExchange`."""
        self.sums.rescale(factor, is_overflow=is_overflow)
