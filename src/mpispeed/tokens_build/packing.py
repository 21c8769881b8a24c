"""Documents packed into rows of a given length: best fit decreasing, within windows of bounded size.

Documents that are longer than a row are cut into pieces of its length, whose last one is packed as any other (the
method of Ding and others, "Fewer Truncations Improve Language Modeling", 2024). Each piece goes to the row with the
least room that holds it, the long ones first, so that only documents longer than a row are ever cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def cut_long(lengths: Counts, row: int) -> Counts:
    """Lengths of the pieces of documents, none longer than `row`, in order.

    Shapes: lengths [D], all at least 1; the result [P], P >= D.
    """
    pieces = -(-lengths // row)
    if len(lengths) == 0 or int(pieces.max()) == 1:
        return lengths
    cut = np.full(int(pieces.sum()), row, np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * row
    return cut


def pack(lengths: Counts, row: int) -> tuple[Counts, Counts]:
    """Best fit decreasing: which pieces stand in which row.

    Pieces of equal length are taken in order, and rows with equal room by age, so the answer depends on nothing but
    the lengths. Rows are in the order of their first piece, and pieces of a row in their own order. Time grows with
    the number of pieces; memory is some 100 bytes for a row beside them.

    Args:
        lengths: tokens of the pieces, 1 to `row`.
        row: most tokens of a row.

    Returns:
        (order, firsts): the pieces in packed order [P], and for each row the place in `order` of its first [R].
    """
    count = len(lengths)
    by_length = np.argsort(-lengths, kind="stable")
    sizes, starts = np.unique(-lengths[by_length], return_index=True)
    row_of = np.empty(count, np.int64)
    room = _Room(row)
    for size, start, stop in zip((-sizes).tolist(), starts.tolist(), [*starts[1:].tolist(), count], strict=True):
        row_of[by_length[start:stop]] = room.place(size, stop - start)
    first_piece = np.full(room.rows, count, np.int64)
    np.minimum.at(first_piece, row_of, np.arange(count))
    rank = np.empty(room.rows, np.int64)
    rank[np.argsort(first_piece, kind="stable")] = np.arange(room.rows)
    row_of = rank[row_of]
    order = np.argsort(row_of, kind="stable")
    return order, np.searchsorted(row_of[order], np.arange(room.rows))


class _Room:
    """Rows by the room that is left in them."""

    def __init__(self, row: int) -> None:
        self.rows, self._row = 0, row
        self._with_room: dict[int, deque[int]] = {}
        self._rooms: list[int] = []  # keys of the above, ascending

    def place(self, size: int, count: int) -> list[int]:
        """Rows of `count` pieces of this size, each in the row with the least room that holds it, or a new one."""
        found: list[int] = []
        while len(found) < count:
            # A row that took one has the least room of all, until it holds no more of them.
            number, left = self._take(size)
            fits = min(left // size, count - len(found))
            found += [number] * fits
            self._give(number, left - fits * size)
        return found

    def _take(self, size: int) -> tuple[int, int]:
        at = bisect_left(self._rooms, size)
        if at == len(self._rooms):
            self.rows += 1
            return self.rows - 1, self._row
        left = self._rooms[at]
        queue = self._with_room[left]
        number = queue.popleft()
        if not queue:
            del self._with_room[left]
            self._rooms.pop(at)
        return number, left

    def _give(self, number: int, left: int) -> None:
        if not left:
            return
        queue = self._with_room.get(left)
        if queue is None:
            self._with_room[left] = queue = deque()
            insort(self._rooms, left)
        queue.append(number)
