"""Lists of pieces against a mask of all pairs: each allowed pair exactly once, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import UsageError
from mpispeed.nn.attention import Piece, pieces_of

LENGTH = 24


def ranges(least: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ranges of a sequence that do not overlap, in any order, some of them empty or touching."""
    cuts = st.lists(st.integers(0, LENGTH), min_size=2 * least, max_size=8).map(sorted)
    pairs = cuts.map(lambda found: list(zip(found[::2], found[1::2], strict=False)))
    return pairs.flatmap(st.permutations).map(list)


def positions(chunks: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([position for start, stop in chunks for position in range(start, stop)], dtype=torch.long)


def allowed(queries, keys, causal, spans) -> torch.Tensor:
    query, key = positions(queries).unsqueeze(1), positions(keys).unsqueeze(0)
    pairs = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)
    if causal:
        pairs &= key <= query
    if spans is not None:
        inside = torch.zeros_like(pairs)
        for start, stop in spans:
            inside |= (query >= start) & (query < stop) & (key >= start) & (key < stop)
        pairs &= inside
    return pairs


def counted(pieces: list[Piece], rows: int, queries, keys) -> torch.Tensor:
    """How often each pair of each row is named."""
    counts = torch.zeros(rows, len(positions(queries)), len(positions(keys)), dtype=torch.long)
    for piece in pieces:
        shape = (piece.queries[1] - piece.queries[0], piece.keys[1] - piece.keys[0])
        ones = torch.ones(shape, dtype=torch.long)
        row = slice(None) if piece.row is None else piece.row
        counts[row, slice(*piece.queries), slice(*piece.keys)] += ones.tril() if piece.is_causal else ones
        assert not piece.is_causal or shape[0] == shape[1]
    return counts


@settings(max_examples=150, deadline=None)
@given(ranges(1), ranges(1), st.booleans(), st.none() | st.lists(ranges(0), min_size=1, max_size=3))
def test_every_allowed_pair_is_named_once_and_no_other(queries, keys, causal, spans):
    pieces = pieces_of(queries, keys, causal=causal, spans=spans)
    rows = [None] if spans is None else spans
    expected = torch.stack([allowed(queries, keys, causal, row) for row in rows])
    assert torch.equal(counted(pieces, len(rows), queries, keys), expected.long())


@pytest.mark.parametrize(
    ("queries", "keys", "expected"),
    [
        ([(0, 8)], [(0, 8)], [Piece((0, 8), (0, 8), is_causal=True)]),
        # a zigzag rank with itself is one causal square, with a later or an earlier rank one rectangle
        ([(0, 2), (6, 8)], [(0, 2), (6, 8)], [Piece((0, 4), (0, 4), is_causal=True)]),
        ([(0, 2), (6, 8)], [(2, 4), (4, 6)], [Piece((2, 4), (0, 4))]),
        ([(2, 4), (4, 6)], [(0, 2), (6, 8)], [Piece((0, 4), (0, 2))]),
        ([(0, 3), (3, 8)], [(0, 8)], [Piece((0, 8), (0, 8), is_causal=True)]),
        ([(0, 4)], [(4, 8)], []),
        ([(4, 5)], [(0, 5)], [Piece((0, 1), (0, 5))]),
    ],
)
def test_causal_chunks_are_as_few_pieces_as_can_be(queries, keys, expected):
    assert pieces_of(queries, keys, causal=True) == expected


def test_rows_with_equal_documents_share_pieces_and_others_have_their_own():
    shared = pieces_of([(0, 8)], [(0, 8)], causal=False, spans=[[(0, 3), (3, 8)], [(3, 8), (0, 3)]])
    assert shared == [Piece((0, 3), (0, 3)), Piece((3, 8), (3, 8))]
    own = pieces_of([(0, 8)], [(0, 8)], causal=True, spans=[[(0, 8)], [(2, 5)]])
    assert own == [Piece((0, 8), (0, 8), True, 0), Piece((2, 5), (2, 5), True, 1)]


def test_ranges_that_end_before_they_start_and_overlapping_documents_are_refused():
    with pytest.raises(UsageError, match=r"the range \(4, 2\) of keys ends before it starts"):
        pieces_of([(0, 4)], [(4, 2)], causal=False)
    with pytest.raises(UsageError, match=r"documents \(0, 5\) and \(4, 8\) of one row overlap"):
        pieces_of([(0, 8)], [(0, 8)], causal=False, spans=[[(0, 5), (4, 8)]])
