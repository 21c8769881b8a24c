"""Ranks in short."""

from hypothesis import example, given
from hypothesis import strategies as st

from mpispeed.base.recorder_file import ranks_of, ranks_text


@given(st.sets(st.integers(0, 200)).map(sorted))
@example([0, 2])
@example([0, 2, 4, 6, 7])
@example([5, 6])
def test_ranks_come_back(ranks):
    assert list(ranks_of(ranks_text(ranks))) == ranks


@given(st.integers(0, 5), st.integers(1, 9), st.integers(3, 10_000))
def test_regular_ranks_are_short(first, step, count):
    assert len(ranks_text(range(first, first + step * count, step))) <= 16
