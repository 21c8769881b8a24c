"""Sums that do not depend on where a buffer was cut, for arbitrary floats and cuts."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.native.checksum import crc32c, crc32c_combine, crc32c_reference
from mpispeed.native.reduce import square_partials, square_partials_reference, tree_sum

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FLOATS, max_size=200), st.integers(1, 40), st.data())
def test_square_total_is_the_same_for_all_cuts_at_blocks(values, block, data):
    x = torch.tensor(values, dtype=torch.float32)
    cuts = data.draw(st.lists(st.integers(0, len(values) // block), max_size=4))
    edges = [0, *sorted(c * block for c in cuts), len(values)]
    pieces = [p for a, b in pairwise(edges) for p in square_partials(x[a:b], block=block)]
    whole = square_partials(x, block=block)
    assert math.fsum(pieces) == math.fsum(whole)
    assert sum(map(Fraction, pieces)) == sum(map(Fraction, whole))
    assert sum(map(Fraction, square_partials_reference(x, block=block))) == sum(map(Fraction, whole))


@given(st.lists(FLOATS, max_size=100))
def test_single_element_blocks_give_the_exact_sum(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert sum(map(Fraction, square_partials(x, block=1))) == sum((Fraction(v) ** 2 for v in x.tolist()), Fraction(0))


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 60), st.integers(0, 2**32))
def test_tree_sum_of_a_range_is_the_range_of_the_tree_sum(number, count, cut, seed):
    source = torch.Generator().manual_seed(seed)
    parts = [torch.randn(count, generator=source) for _ in range(number)]
    cut = min(cut, count)
    whole = torch.empty(count)
    tree_sum(whole, parts, scale=0.7)
    tail = torch.empty(count - cut)
    tree_sum(tail, [x[cut:] for x in parts], scale=0.7)
    assert torch.equal(tail, whole[cut:])


@given(st.binary(max_size=4000), st.binary(max_size=4000), st.integers(0, 2**32 - 1))
def test_checksum_of_a_concatenation(first, second, value):
    assert crc32c(first + second, value) == crc32c(second, crc32c(first, value))
    assert crc32c(first + second) == crc32c_combine(crc32c(first), crc32c(second), len(second))
    assert crc32c_reference(first, value) == crc32c(first, value)
