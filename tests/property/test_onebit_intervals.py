"""Intervals of 0/1 Adam: functions of the step against counters that are kept from step to step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.optim.exchange import Exchange
from mpispeed.optim.zero_one_adam import Intervals, ZeroOneAdam
from tests.helpers.onebit_reference import Counters

KINDS = {
    "full": Exchange.GRADIENT,
    "coded": Exchange.CODED_GRADIENT,
    "local": Exchange.NOTHING,
    "sync": Exchange.DRIFT,
}
SMALL = st.integers(1, 9)


@given(freeze=st.integers(1, 120), kappa=SMALL, alpha=SMALL, most=st.integers(1, 20))
def test_they_are_what_counting_gives(freeze: int, kappa: int, alpha: int, most: int) -> None:
    rule = ZeroOneAdam(
        var_freeze_step=freeze, var_update_scaler=kappa, local_step_scaler=alpha, local_step_clipper=most
    )
    counters = Counters(freeze, kappa, alpha, most)
    for step in range(1, 250):
        assert rule.exchanges(step) is KINDS[counters.next()], step


@given(freeze=st.integers(1, 10**6), kappa=st.integers(1, 50), most=st.integers(1, 64), step=st.integers(1, 10**9))
def test_far_steps_need_no_counting(freeze: int, kappa: int, most: int, step: int) -> None:
    intervals = Intervals(freeze, kappa, 1, most)
    assert intervals.is_frozen(step) is (step > freeze)
    assert not (intervals.is_frozen(step) and intervals.is_variance_step(step))
    assert not (not intervals.is_frozen(step) and intervals.is_sync_step(step))
    late = max(step, freeze + 100)  # the interval has reached its longest
    assert intervals.is_sync_step(late) is (late % most == 0)
    assert any(intervals.is_sync_step(late + k) for k in range(most))


@pytest.mark.parametrize("kappa", [1, 2, 16])
def test_variance_steps_double_their_distance(kappa: int) -> None:
    intervals = Intervals(5000, kappa, 1, 1)
    steps = [step for step in range(1, 5001) if intervals.is_variance_step(step)]
    for j, (here, there) in enumerate(itertools.pairwise(steps)):
        # Multiples of the longer interval: the first of them may be nearer than one interval.
        assert there - here <= 2 ** ((j + 1) // kappa)
        assert there % 2 ** ((j + 1) // kappa) == 0
