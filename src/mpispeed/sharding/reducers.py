"""Sums of a unit's gradients over ranks, plain or quantized, and the queue of started ones, for `GradStore`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from mpispeed.base import log as logs
from mpispeed.mesh.compressed.quantized import Feedback, quantized_reduce_scatter
from mpispeed.store.layout import BLOCK
from mpispeed.store.transfers import reduce_into

if TYPE_CHECKING:
    import torch

    from mpispeed.mesh.mesh import Axes, Mesh
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Entry
    from mpispeed.store.placement import Placement
    from mpispeed.store.table import Unit

log = logging.getLogger(__name__)


class Listener:
    """Observer of gradients before and after sums; by default ignores everything."""

    def note(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """Note a gradient that the next sum of the unit will contain."""

    def forget(self) -> None:
        """Forget noted gradients, which are not going to be summed."""

    def adjust(self, factor: float, *, is_overflow: bool) -> None:
        """Follow the loss scale, multiplied by `factor`; after an overflow if so."""


class Reducer(Protocol):
    """Sums gradients over ranks. `__call__` may run on a channel's progress thread; the rest runs on the caller's."""

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """Leave `scale` times this rank's part of the sum of `wire` in `target`; `wire` is scratch.

        Collective over: the axes that the reducer was made for.
        Shapes: wire [padded], target [this rank's range]; `target` may be a slice of `wire` or of another dtype.
        """

    def note(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """As in `Listener`."""

    def forget(self) -> None:
        """As in `Listener`."""

    def adjust(self, factor: float, *, is_overflow: bool) -> None:
        """As in `Listener`."""


class PlainReducer(Listener):
    """Sums by `store.transfers.reduce_into`."""

    def __init__(self, partial: Axes, placement: Placement, *, scatters: bool = True) -> None:
        """Args: without `scatters` buffers are all-reduced and each rank takes its range."""
        self._partial, self._placement, self._scatters = partial, placement, scatters

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """As in `Reducer`."""
        placement, scatters = self._placement, self._scatters
        reduce_into(mesh, wire, target, self._partial, placement, scale=scale, scatters=scatters, arena=arena)


class QuantizedReducer(Listener):
    """Sums in two hops of 4-bit codes, inside nodes first; for gradients sharded over `inner`, then `outer`.

    Units of vectors alone (norms, biases) and fp64 units are summed as they are.

    Source: ZeRO++ (arXiv 2306.10209), qgZ.
    """

    def __init__(
        self, inner: str, outer: str, plain: Reducer, *, block: int = BLOCK, feedback: Callable[[], Feedback] | None
    ) -> None:
        """Args: `plain` reduces units that are not quantized; `feedback` makes the error feedback of one unit."""
        self._inner, self._outer, self._plain, self._block = inner, outer, plain, block
        self._make_feedback = feedback
        self._feedbacks: dict[int, Feedback] = {}

    def takes(self, unit: Unit, wire: torch.Tensor) -> bool:
        """True if the unit's gradients are quantized."""
        is_made_of_vectors = all(len(entry.shape) < 2 for entry in unit.layout.entries)
        return wire.itemsize <= 4 and not is_made_of_vectors

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """As in `Reducer`."""
        if not self.takes(unit, wire):
            text = f"unit {unit.name!r} holds vectors or fp64 values alone; its gradients are not quantized"
            logs.once(log, logging.INFO, text)
            self._plain(mesh, unit, wire, target, scale, arena)
            return
        kept = None
        if self._make_feedback is not None:
            kept = self._feedbacks.get(unit.index) or self._feedbacks.setdefault(unit.index, self._make_feedback())
        inner, outer = mesh[self._inner], mesh[self._outer]
        quantized_reduce_scatter(inner, outer, target, wire, block=self._block, scale=scale, feedback=kept)

    def adjust(self, factor: float, *, is_overflow: bool) -> None:
        """Forget errors after an overflow; otherwise scale them with the loss."""
        for feedback in self._feedbacks.values():
            if is_overflow:
                feedback.clear()
            elif factor != 1.0:
                feedback.rescale(factor)


LEAST_ELEMENTS = 1 << 22
"""So much may be under way in any case: small units should not wait for each other."""


def limit_of(sizes: Iterable[int]) -> int:
    """Elements that may be in flight for units of these sizes: two of the largest."""
    return max(2 * max(sizes, default=0), LEAST_ELEMENTS)


class Backlog:
    """Started and unfinished sums, oldest first; bounded, because their buckets take memory."""

    def __init__(self, limit_elements: int) -> None:
        self._limit, self._total = limit_elements, 0
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()

    def add(self, elements: int, settle: Callable[[], object]) -> None:
        """Call `settle` of the oldest until `elements` fit under the limit, then append."""
        while self._queue and self._total + elements > self._limit:
            self._pop()
        self._queue.append((elements, settle))
        self._total += elements

    def clear(self) -> None:
        """Settle everything."""
        while self._queue:
            self._pop()

    def _pop(self) -> None:
        elements, settle = self._queue.popleft()
        self._total -= elements
        settle()
