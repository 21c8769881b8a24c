"""Points of series, as they are selected from rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """A series.

    Attributes:
        name: of it.
        ranks: that have points, ascending.
        count: of all points.
    """

    name: str
    ranks: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Points:
    """Points of a series on one rank, in the order in which they were written; arrays of shape [n].

    Attributes:
        step: global step.
        samples: of the whole run, by which monitors order their points.
        time: when the point was written, in Unix seconds.
        value: of the series.
    """

    step: np.ndarray
    samples: np.ndarray
    time: np.ndarray
    value: np.ndarray

    def __len__(self) -> int:
        return len(self.step)


class SeriesTable:
    """Rows of several series and ranks.

    Args:
        names: of series; a row names its series by the place in it.
        rows: of the dtype `layout.ROW`, shape [n].

    Raises:
        ValueError: a row is of a series without a name.
    """

    def __init__(self, names: Sequence[str], rows: np.ndarray) -> None:
        self.names, self.rows = tuple(names), rows
        self._numbers = {name: number for number, name in reversed(list(enumerate(self.names)))}
        if len(rows) and int(rows["series"].max()) >= len(self.names):
            msg = f"a row is of series {rows['series'].max()}, and there are names of {len(self.names)}"
            raise ValueError(msg)
        keys = rows["series"].astype(np.uint64) << np.uint64(32) | rows["rank"].astype(np.uint64)
        self._order = np.argsort(keys, kind="stable")
        found, starts = np.unique(keys[self._order], return_index=True)
        ends = [*starts.tolist(), len(rows)][1:]
        self._parts = {
            (int(key) >> 32, int(key) & 0xFFFFFFFF): (start, end)
            for key, start, end in zip(found.tolist(), starts.tolist(), ends, strict=True)
        }

    def series(self) -> list[SeriesInfo]:
        """All series that have points, in the order of their names' numbers."""
        ranks: dict[int, list[int]] = {}
        counts: dict[int, int] = {}
        for (number, rank), (start, end) in self._parts.items():
            ranks.setdefault(number, []).append(rank)
            counts[number] = counts.get(number, 0) + end - start
        return [SeriesInfo(self.names[number], tuple(own), counts[number]) for number, own in ranks.items()]

    def points(self, name: str, rank: int = 0) -> Points:
        """The points of one series on one rank; none where there are none.

        Raises:
            KeyError: there is no series of this name.
        """
        start, end = self._parts.get((self._numbers[name], rank), (0, 0))
        rows = self.rows[self._order[start:end]]
        return Points(*(np.ascontiguousarray(rows[field]) for field in ("step", "samples", "time", "value")))
