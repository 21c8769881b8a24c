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
        self._coded, self._coder = coded, Coder(lane, hops)
        self._step = 0
        self._done: set[int] = set()

    def begin(self, step: int) -> bool:
        """Prepare for update number `step`; True if its units are coded early. Local, the same on all ranks.

        The first coded momentum is not: what it needs from other ranks once is fetched there.
        """
        self._done.clear()
        self._step = step
        kind = self._coded.kind(step)
        return kind is Exchange.CODED_GRADIENT or (kind is Exchange.MOMENTUM and self._coded.has_momenta)

    def __call__(self, unit: Unit, grad: torch.Tensor) -> None:
        """Agree on a unit, in place of its gradients; on the lane's thread.

        Collective over: the data axis, in the order of the lane.
        """
        self._coded.code(unit, self._step, 1.0, grad, self._coder)
        self._done.add(unit.index)

    def takes(self, unit: Unit) -> bool:
        """False for a unit whose gradients may have to be summed over other axes first."""
        return unit.kind is None

    def has(self, unit: Unit) -> bool:
        """True if the unit was coded for the coming update."""
        return unit.index in self._done
