"""How many sums of gradients may be under way: their buckets are memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

LEAST_ELEMENTS = 1 << 22
"""So much may be under way in any case: small units should not wait for each other."""


def limit_of(sizes: Iterable[int]) -> int:
    """Elements that may be under way for units of these sizes: two of the largest."""
    return max(2 * max(sizes, default=0), LEAST_ELEMENTS)


class Backlog:
    """What was started and not yet waited for, oldest first."""

    def __init__(self, limit_elements: int) -> None:
        self._limit, self._total = limit_elements, 0
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()

    def add(self, elements: int, settle: Callable[[], object]) -> None:
        """Make room for `elements` by calling `settle` of the oldest ones, then count them too."""
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
