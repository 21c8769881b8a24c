"""The exact sum behind the global norm: limbs of ranks are added, whatever the cut between them."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpispeed.native import exact_squares, exact_sum
from mpispeed.native.reduce import square_partials

ANY = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
NORMAL = st.floats(min_value=0, max_value=1e150)
SPECIAL = [math.inf, math.nan]


def on_device(values):
    """What torch makes of doubles where they are."""
    limbs = torch.zeros(exact_sum.LIMBS, dtype=torch.int64)
    exact_sum.add_doubles(limbs, torch.tensor(values, dtype=torch.float64))
    exact_sum.carry(limbs)
    return limbs


@settings(max_examples=1000)
@given(st.lists(NORMAL | ANY, max_size=60), st.lists(st.integers(0, 60), max_size=6), st.integers(0, 63))
@example([5e-324, 2.0**1023, 2.0**1023 - 2.0**970], [1], 1)
def test_any_cut_over_ranks_has_the_bits_of_fsum(values, cuts, kinds):
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    sums = torch.zeros(exact_sum.LIMBS, dtype=torch.int64)
    for rank, (begin, end) in enumerate(pairwise(edges)):
        sums += (on_device if kinds >> rank & 1 else exact_sum.limbs_of)(values[begin:end])
    try:
        expected = math.fsum(values)
    except OverflowError:
        expected = math.inf
    assert exact_sum.value_of(sums) == expected
    if expected < math.inf:
        assert sum(map(Fraction, exact_sum.doubles_of(sums))) == sum(map(Fraction, values))


@given(st.lists(st.tuples(st.integers(0, 67), st.integers(0, 2**62 - 1)), max_size=8))
@example([(0, 1 << 13)])  # half of the least double
@example([(0, 3 << 13)])
@example([(65, 1 << 61)])  # beyond fp64
@example([(10, 1), (12, (1 << 53) + 1)])
@example([(9, 1 << 31), (11, (1 << 20) + 1)])
def test_the_compiled_value_is_that_of_pythons_integers(some):
    limbs = torch.zeros(exact_sum.LIMBS, dtype=torch.int64)
    for at, limb in some:
        limbs[at] = limb
    assert str(exact_sum.value_of(limbs)) == str(exact_sum.value_of_reference(limbs))


@given(st.lists(ANY | st.floats(-1e150, 1e150) | st.sampled_from(SPECIAL), max_size=20))
def test_the_compiled_limbs_are_those_of_pythons_integers(values):
    values = [2 * math.fsum(abs(value) for value in values if -1e200 < value < 1e200) + 1.0, *values]
    assert exact_sum.limbs_of(values).tolist() == exact_sum.limbs_of_reference(values).tolist()


@given(st.lists(st.floats(-1e150, 1e150), max_size=20))
def test_parts_of_a_sum_may_be_below_zero(values):
    values = [2 * math.fsum(map(abs, values)) + 1.0, *values]
    assert exact_sum.value_of(exact_sum.limbs_of(values)) == math.fsum(values)


@pytest.mark.parametrize("limbs", [exact_sum.limbs_of, on_device])
@pytest.mark.parametrize("bad", SPECIAL)
def test_a_bad_value_wins(limbs, bad):
    found = limbs([1.0, bad, 2.0]) + limbs([3.0])
    assert str(exact_sum.value_of(found)) == str(bad)
    assert str(exact_sum.doubles_of(found)) == f"[{bad}]"
    assert math.isnan(exact_sum.value_of(found + limbs([math.nan])))


def test_a_billion_ranks_fit():
    full = exact_sum.limbs_of([1.7e308, 3.3, 1e-310, 5e-324])
    most = full * (1 << 20)
    assert bool((most >= 0).all())
    exact_sum.carry(full)
    assert int(full.max()) < 1 << 33
    assert exact_sum.value_of(exact_sum.limbs_of([3.3]) * (1 << 30)) == 3.3 * 2**30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_squares_of_a_device_are_those_of_the_host(dtype):
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype) for count in (1, 255, 7001)]
    limbs = torch.zeros(exact_sum.LIMBS, dtype=torch.int64)
    exact_squares.add_squares(limbs, parts, block=256)
    host = exact_sum.limbs_of([value for part in parts for value in square_partials(part)])
    exact_sum.carry(limbs)
    assert exact_sum.doubles_of(limbs) == exact_sum.doubles_of(host)
