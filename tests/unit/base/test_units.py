"""Numbers in words."""

import pytest

from mpispeed.base.units import format_bytes, format_list, format_ranks


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


@pytest.mark.parametrize(
    ("count", "words"),
    [(1032192, "1008 KiB"), (1023, "1023 B"), (999.5 * 1024, "1000 KiB"), (999.4 * 1024, "999 KiB"),
     (1 << 20, "1 MiB"), (1020 << 20, "1020 MiB"), (1.17 * 2**30, "1.17 GiB"), (3000 << 40, "3000 TiB"),
     (-1032192, "-1008 KiB")],
)  # fmt: skip
def test_bytes_have_no_exponent(count, words):
    assert format_bytes(count) == words


def test_a_list_says_how_many_more_there_are():
    texts = [format_list(["a", "b", "c"], most) for most in (1, 2, 3, 4)]
    assert texts == ["a and 2 more", "a, b and 1 more", "a, b, c", "a, b, c"]
    assert format_list([], 3) == ""
