"""Halves of a ring's own block, and heads that ranks of Ulysses get."""

import pytest
import torch

from mpispeed.mesh import CommTrace, solo_comm
from mpispeed.nn.attention.pieces import Piece, pieces_of
from mpispeed.nn.sequence.ring import halves
from mpispeed.nn.sequence.ulysses import Trade


def pairs(pieces, rows, length):
    found = torch.zeros(rows, length, length, dtype=torch.int64)
    for piece in pieces:
        (a, b), (c, d) = piece.queries, piece.keys
        seen = torch.ones(b - a, d - c, dtype=torch.int64)
        found[slice(None) if piece.row is None else piece.row, a:b, c:d] += seen.tril() if piece.is_causal else seen
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spans", [None, (((0, 9), (9, 30)), ((4, 29),)), (((0, 1), (1, 30)),) * 2])
@pytest.mark.parametrize("ranges", [((0, 30),), ((0, 7), (23, 30)), ((11, 12),)])
def test_halves_are_the_same_pairs_in_about_equal_parts(causal, spans, ranges):
    pieces = pieces_of(ranges, ranges, causal=causal, spans=spans)
    now, later = halves(pieces)
    length = sum(end - start for start, end in ranges)
    whole, parts = pairs(pieces, 2, length), (pairs(now, 2, length), pairs(later, 2, length))
    assert torch.equal(parts[0] + parts[1], whole)
    if length > 10:
        assert 0.3 <= parts[0].sum() / whole.sum() <= 0.7


@pytest.mark.parametrize(
    ("heads", "kv_heads", "keys", "repeats"),
    [(8, 2, (0, 2), None), (5, 1, (0, 1), None), (8, 4, (0, 4), None), (0, 1, (0, 0), None)],
)
def test_one_rank_gets_every_head(heads, kv_heads, keys, repeats):
    trade = Trade(solo_comm(0, ("sequence",), "ordered", CommTrace()), (4,), heads, kv_heads)
    assert (trade.queries(0), trade.keys(0), trade.repeats()) == ((0, heads), keys, repeats)


def test_a_piece_of_one_query_stays_whole():
    assert halves([Piece((0, 1), (0, 5))]) == ([Piece((0, 1), (0, 5))], [])
