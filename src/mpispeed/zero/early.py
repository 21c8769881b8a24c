"""One-bit exchanges beside the backward pass: a unit is coded as soon as its gradients are there.

That needs a multiplier that is known before the norm is, so there is no clipping and no loss scale. What was agreed on
stands in place of the gradients until the step; if the step is skipped, momenta are as they were, and errors are
forgotten, because they are of what was thrown away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.optim.exchange import Exchange
from mpispeed.zero.coder import Coder

if TYPE_CHECKING:
    import torch

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.table import Unit
    from mpispeed.zero.coded import CodedExchange


class EarlyExchange:
    """Codes units on the lane of gradients. Each unit is coded at most once for an update."""

    def __init__(self, coded: CodedExchange, lane: Mesh, hops: tuple[str, str] | None) -> None:
        self._coded, self._coder = coded, Coder(lane, hops, coded.coder.device)
        self._step = 0
        self._done: set[int] = set()

    def begin(self, step: int) -> None:
        """Prepare for update number `step`. Local."""
        self.end(is_applied=False)
        self._step = step

    def __call__(self, unit: Unit, grad: torch.Tensor) -> None:
        """Agree on a unit, in place of its gradients; on the lane's thread.

        Collective over: the data axis, in the order of the lane.
        """
        self._coded.code(unit, self._step, 1.0, grad, self._coder)
        self._done.add(unit.index)

    @property
    def is_pending(self) -> bool:
        """True if units were coded for an update that has not taken them."""
        return bool(self._done)

    def end(self, *, is_applied: bool) -> None:
        """The update has taken what was coded, or never will: then errors of it are forgotten. Local."""
        if self._done and not is_applied:
            self._coded.clear_errors()
        self._done.clear()

    def is_ready(self) -> bool:
        """True if units can be coded early now. Local, the same on all ranks.

        The first coded momentum is not, nor one after states were set: what these need from others is fetched late.
        """
        kind = self._coded.kind(self._step)
        return kind is Exchange.CODED_GRADIENT or (kind is Exchange.MOMENTUM and self._coded.has_momenta)

    def takes(self, unit: Unit) -> bool:
        """False for a unit whose gradients may have to be summed over other axes first."""
        return unit.kind is None

    def has(self, unit: Unit) -> bool:
        """True if the unit was coded for the coming update."""
        return unit.index in self._done
