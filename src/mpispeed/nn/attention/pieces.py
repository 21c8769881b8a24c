"""Lists of rectangles and causal squares that say what attends to what; no mask of all pairs is ever made.

Documents, padding, the blocks of a ring and causal order are such lists. A token that no piece names sees nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpispeed.base.errors import UsageError

Range = tuple[int, int]


class Piece(NamedTuple):
    """Queries [start, stop) see keys [start, stop); units are tokens, counted from the first of a tensor.

    Attributes:
        queries: range of rows of the query tensor.
        keys: range of rows of the key and value tensors.
        is_causal: query i of the range sees the keys 0..i of the range; both ranges have one length then.
        row: the row of the batch this is about; None: all rows.
    """

    queries: Range
    keys: Range
    is_causal: bool = False
    row: int | None = None


class _Overlap(NamedTuple):
    """A global range of positions that a chunk and a document share, and where the chunk has it locally."""

    start: int
    stop: int
    shift: int  # local = global + shift

    def local(self, start: int, stop: int) -> Range:
        return start + self.shift, stop + self.shift


def pieces_of(
    queries: Sequence[Range], keys: Sequence[Range], *, causal: bool, spans: Sequence[Sequence[Range]] | None = None
) -> list[Piece]:
    """The pieces of an attention between two sets of positions of one sequence.

    Args:
        queries: global ranges [start, stop) of the queries in the order in which the tensor has them.
        keys: likewise of the keys.
        causal: a query sees no key after its own position.
        spans: for each row of the batch its documents as global ranges, which do not overlap. A token sees its own
            document only; a token outside of all documents sees nothing and nobody sees it. None: one document.

    Returns:
        Pieces in local coordinates that cover every allowed pair exactly once. Rows with equal documents share
        pieces where all rows are equal (`row` is None), else each row has its own.

    Raises:
        UsageError: a range ends before it starts, or documents overlap.
    """
    _check(queries, "queries")
    _check(keys, "keys")
    if spans is None:
        return _rectangles(queries, keys, causal, None)
    found: dict[tuple[Range, ...], list[Piece]] = {}
    per_row = []
    for row in spans:
        documents = tuple(sorted((int(start), int(stop)) for start, stop in row if stop != start))
        if documents not in found:
            _check(documents, "documents")
            for before, after in itertools.pairwise(documents):
                if after[0] < before[1]:
                    msg = f"documents {before} and {after} of one row overlap; each token belongs to one document"
                    raise UsageError(msg)
            found[documents] = _rectangles(queries, keys, causal, documents)
        per_row.append(found[documents])
    if len(found) == 1:
        return per_row[0]
    return [piece._replace(row=row) for row, pieces in enumerate(per_row) for piece in pieces]


def _check(ranges: Sequence[Range], of: str) -> None:
    for start, stop in ranges:
        if stop < start:
            msg = f"the range ({start}, {stop}) of {of} ends before it starts; ranges are (start, stop)"
            raise UsageError(msg)


def _rectangles(
    queries: Sequence[Range], keys: Sequence[Range], causal: bool, documents: Sequence[Range] | None
) -> list[Piece]:
    """Pieces of one row: each document by itself, neighbours joined where they touch locally."""
    if documents is None:
        found = [*queries, *keys]
        documents = [(min(start for start, _ in found), max(stop for _, stop in found))] if found else []
    query_parts, key_parts = _overlaps(queries, documents), _overlaps(keys, documents)
    pieces: list[Piece] = []
    for of_queries, of_keys in zip(query_parts, key_parts, strict=True):
        own = [piece for part in of_queries for key in of_keys for piece in _pair(part, key, causal)]
        pieces += _joined(own)
    return pieces


def _overlaps(chunks: Sequence[Range], documents: Sequence[Range]) -> list[list[_Overlap]]:
    """For each document what the chunks have of it, in local order; neighbours in both orders are one."""
    found: list[list[_Overlap]] = [[] for _ in documents]
    begin = 0
    for start, stop in chunks:
        shift = begin - start
        for parts, (first, last) in zip(found, documents, strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                if parts and parts[-1].stop == low and parts[-1].shift == shift:
                    low = parts.pop().start
                parts.append(_Overlap(low, high, shift))
        begin += stop - start
    return found


def _pair(part: _Overlap, key: _Overlap, causal: bool) -> Iterator[Piece]:
    """The pieces of one range of queries and one of keys of the same document."""
    everything = Piece(part.local(part.start, part.stop), key.local(key.start, key.stop))
    if not causal or key.stop <= part.start + 1:
        yield everything
        return
    low, high = max(part.start, key.start), min(part.stop, key.stop)
    if low >= high:  # all keys are later
        return
    if key.start < low:  # keys before the first query: all queries see them
        yield Piece(everything.queries, key.local(key.start, low))
    yield Piece(part.local(low, high), key.local(low, high), is_causal=True)
    if high < part.stop:  # queries after the last key see the keys of the square, too
        yield Piece(part.local(high, part.stop), key.local(low, high))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The same pairs in fewer pieces: one call of a kernel costs less than two, and needs no merge."""
    rectangles = {(piece.queries, piece.keys) for piece in pieces if not piece.is_causal}
    squares = sorted(piece for piece in pieces if piece.is_causal)
    joined: list[Piece] = []
    for square in squares:
        # two squares on the diagonal and the rectangle under the first are one square (a zigzag rank with itself)
        while joined and joined[-1].queries[1] == square.queries[0] and joined[-1].keys[1] == square.keys[0]:
            below = (square.queries, joined[-1].keys)
            if below not in rectangles:
                break
            rectangles.remove(below)
            before = joined.pop()
            square = Piece((before.queries[0], square.queries[1]), (before.keys[0], square.keys[1]), is_causal=True)
        joined.append(square)
    ordered = _side_by_side(sorted(rectangles))
    flipped = _side_by_side(sorted((keys, queries) for queries, keys in ordered))
    return joined + [Piece(queries, keys) for keys, queries in flipped]


def _side_by_side(pairs: list[tuple[Range, Range]]) -> list[tuple[Range, Range]]:
    """Pairs with one first range whose second ranges touch, joined; sorted in and out."""
    found: list[tuple[Range, Range]] = []
    for first, second in pairs:
        if found and found[-1][0] == first and found[-1][1][1] == second[0]:
            found[-1] = (first, (found[-1][1][0], second[1]))
        else:
            found.append((first, second))
    return found
