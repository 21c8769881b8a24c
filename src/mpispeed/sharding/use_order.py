"""The order in which passes use units, and what it lets expect of the next pass."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

Use = tuple[int, bool]
"""Index of a unit, and whether it was used in a backward pass."""


@dataclass(slots=True)
class _Trace:
    uses: tuple[Use, ...] = ()
    lengths: tuple[int, ...] = ()  # how often in a row
    ends: list[int] = field(default_factory=list)  # elements used up to and including each use
    places: dict[int, list[int]] = field(default_factory=dict)  # where each unit is used
    absent: frozenset[int] = frozenset()  # units whose layers were left out

    @classmethod
    def of(cls, uses: Sequence[Use], lengths: Sequence[int], sizes: Sequence[int], absent: frozenset[int]) -> _Trace:
        trace, total = cls(tuple(uses), tuple(lengths), absent=absent), 0
        for place, (unit, _) in enumerate(uses):
            total += sizes[unit]
            trace.ends.append(total)
            trace.places.setdefault(unit, []).append(place)
        return trace


class Order:
    """Predicts the next units. Equal calls on all ranks give equal predictions; time plays no part.

    A pass is one run of the outermost module with what follows until the next one. Passes of one kind are expected
    to use units in the same order; where one deviates, predictions continue after the next matching use, or end.
    Units whose layers a pass leaves out (`absent`) are not expected in it, and not forgotten.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Args: `sizes` are the elements of the units."""
        self._sizes = sizes
        self._known: dict[Hashable, _Trace] = {}
        self._kind: Hashable = None
        self._trace = _Trace()
        self._place: int | None = None  # of the next expected use; None: not known
        self._uses: list[Use] = []
        self._lengths: list[int] = []
        self._absent: frozenset[int] = frozenset()
        self.deviations = 0

    def begin(self, kind: Hashable, absent: frozenset[int] = frozenset()) -> None:
        """Begin a pass; the finished one becomes the expectation for the next of its kind."""
        self.end()
        self._kind, self._absent = kind, absent
        self._trace = self._known.get(kind, _Trace())
        self._place = 0 if self._trace.uses else None

    def end(self) -> None:
        """End the pass."""
        if self._uses and not self._is_expected():
            self._known[self._kind] = _Trace.of(self._uses, self._lengths, self._sizes, self._absent)
        self._uses, self._lengths, self._trace, self._place = [], [], _Trace(), None

    def _is_expected(self) -> bool:
        """True if only units that were left out tell this pass from the known one, and it left out no fewer."""
        known, absent = self._trace, self._absent
        if absent == known.absent:
            return (tuple(self._uses), tuple(self._lengths)) == (known.uses, known.lengths)
        either = absent | known.absent
        alike = _without(self._uses, self._lengths, either) == _without(known.uses, known.lengths, either)
        return alike and len(absent) >= len(known.absent)

    def forget(self) -> None:
        """Expect nothing any more."""
        self.end()
        self._known.clear()

    def note(self, unit: int, *, is_backward: bool) -> None:
        """Record that `unit` is used now; using it twice in a row is one use."""
        use = unit, is_backward
        if self._uses and self._uses[-1] == use:
            self._lengths[-1] += 1
            return
        self._uses.append(use)
        self._lengths.append(1)
        if self._place is None or unit in self._trace.absent:
            return
        for place in self._trace.places.get(unit, ())[self._first(unit) :]:
            if self._trace.uses[place] == use:
                between = self._trace.uses[self._place : place]
                self.deviations += any(other != use and other[0] not in self._absent for other in between)
                self._place = place + 1
                return
        self.deviations += 1
        self._place = None

    def _first(self, unit: int) -> int:
        return bisect.bisect_left(self._trace.places.get(unit, ()), self._place or 0)

    @property
    def is_known(self) -> bool:
        """True while predictions can be made."""
        return self._place is not None

    def upcoming(self, uses: int) -> Iterator[int]:
        """Units of the next `uses` uses that are expected, in their order."""
        if self._place is not None:
            for place in range(self._place, min(self._place + uses, len(self._trace.uses))):
                if self._trace.uses[place][0] not in self._absent:
                    yield self._trace.uses[place][0]

    def distance(self, unit: int) -> int | None:
        """Elements of other units that are expected to be used before `unit` is; None if it is not expected."""
        if self._place is None or unit in self._absent:
            return None
        places = self._trace.places.get(unit, ())
        first = self._first(unit)
        if first == len(places):
            return None
        before = self._trace.ends[self._place - 1] if self._place else 0
        return self._trace.ends[places[first]] - self._sizes[unit] - before

    def is_within(self, unit: int, limit: int) -> bool:
        """True if `unit` and the others that are expected before it is used again have at most `limit` elements."""
        if self.distance(unit) is None:
            return False
        seen, total = {unit}, self._sizes[unit]
        for other, _ in self._trace.uses[self._place :]:
            if other == unit or total > limit:
                break
            if other not in seen and other not in self._absent:
                seen.add(other)
                total += self._sizes[other]
        return total <= limit

    def is_unfinished(self, unit: int) -> bool:
        """True if `unit` is in use and expected to be used again before any other."""
        if not self._place or not self._uses or self._uses[-1][0] != unit:
            return False
        if self._trace.uses[self._place - 1] != self._uses[-1]:
            return False  # the known pass left it out
        return self._lengths[-1] < self._trace.lengths[self._place - 1]


def _without(uses: Sequence[Use], lengths: Sequence[int], absent: frozenset[int]) -> list[tuple[Use, int]]:
    """The uses of other units with how often each comes in a row."""
    found: list[tuple[Use, int]] = []
    for use, length in zip(uses, lengths, strict=True):
        if use[0] in absent:
            continue
        if found and found[-1][0] == use:
            length += found.pop()[1]
        found.append((use, length))
    return found
