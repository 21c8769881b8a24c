"""Numbers in words."""

import pytest

from mpispeed.base.units import format_ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        (range(10), "ranks 0-9"),
        ([0, 1, 2, 8], "ranks 0-2, 8"),
        ([5, 5], "rank 5"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..."),
    ],
)
def test_ranks(ranks, words):
    assert format_ranks(ranks) == words
