"""The exact sum behind the global norm."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from mpispeed.sharding.grad_shards import compress

doubles = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e150, max_value=1e150)


@given(st.lists(doubles, max_size=60))
def test_compressed_sum_is_exact(values):
    partials = compress(values)
    assert sum(map(Fraction, partials)) == sum(map(Fraction, values))
    assert len(partials) <= 64


@given(st.lists(doubles, min_size=1, max_size=20), st.integers(0, 20))
def test_a_bad_value_wins(values, position):
    for bad in (math.inf, math.nan):
        result = compress([*values[:position], bad, *values[position:]])
        assert len(result) == 1
        assert not math.isfinite(result[0])
