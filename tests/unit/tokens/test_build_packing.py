"""Whole documents packed into rows: every piece once, no row too long, best fit as the slow definition says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.tokens_build.packing import cut_long, pack

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=80)


def slow(lengths, row):
    """Best fit decreasing, one piece at a time: the row with the least room that holds it, the oldest of equals."""
    rooms, members = [], []
    for piece in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        fitting = [(room, at) for at, room in enumerate(rooms) if room[0] >= lengths[piece]]
        if fitting:
            at = min(fitting)[1]
        else:
            at = len(rooms)
            rooms.append((row, 0))
            members.append([])
        rooms[at] = (rooms[at][0] - lengths[piece], len(members[at]))
        members[at].append(piece)
    return [len(each) for each in members], [row - room for room, _ in rooms]


@given(LENGTHS, st.integers(12, 30))
def test_rows_hold_every_piece_once_and_as_well_as_one_at_a_time(lengths, row):
    order, firsts = pack(np.array(lengths), row)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = np.split(order, firsts[1:])
    assert all(sum(lengths[piece] for piece in each) <= row for each in rows)
    assert all((np.diff(each) > 0).all() for each in rows)  # pieces of a row keep their order
    assert [each[0] for each in rows] == sorted(each[0] for each in rows)
    filled = slow(lengths, row)[1]
    # which of rows with equal room is taken changes nothing about how full rows get
    assert sorted(sum(lengths[piece] for piece in each) for each in rows) == sorted(filled)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 20))
def test_long_documents_are_cut_into_full_rows_and_a_rest(lengths, row):
    expected = [piece for n in lengths for piece in [row] * ((n - 1) // row) + [(n - 1) % row + 1]]
    assert cut_long(np.array(lengths, np.int64), row).tolist() == expected


def test_rows_are_nearly_full_where_documents_are_short():
    lengths = np.random.default_rng(3).lognormal(5, 1, 4000).astype(np.int64).clip(1)
    pieces = cut_long(lengths, 2048)
    firsts = pack(pieces, 2048)[1]
    assert len(firsts) <= -(-int(lengths.sum()) // 2048) * 1.01 + 1


@pytest.mark.parametrize("count", [1, 5])
def test_pieces_of_one_row_each(count):
    order, firsts = pack(np.full(count, 7), 7)
    assert order.tolist() == firsts.tolist() == list(range(count))
