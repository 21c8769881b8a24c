"""Bits that fall during training: the steps at which they do, to the step, and their state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.nn.compression.bits import BitPlan, BitSchedule


def falls(plan, steps, curvature=lambda step: None):
    """{step: bits} of all steps at which a bit falls."""
    schedule, found = BitSchedule(plan), {}
    for step in range(1, steps + 1):
        before = schedule.bits
        schedule.advance(curvature(step))
        if schedule.bits != before:
            found[step] = schedule.bits
    return found


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (BitPlan(12, 8, 50), [50, 100, 200, 400]),
        (BitPlan(16, 8, 100), [100, 200, 400, 800, 1600, 3200, 6400, 12800]),
        (BitPlan(8, 8, 50), []),
        (BitPlan(4, 1, 1), [1, 2, 4]),
        (BitPlan(12, 8, 50, offset=7), [57, 107, 207, 407]),
    ],
)
def test_bits_fall_at_the_steps_of_the_specification(plan, steps):
    expected = {step: plan.start - 1 - index for index, step in enumerate(steps)}
    assert falls(plan, 13000) == expected


def test_curvature_makes_the_next_period_longer():
    """Factors 1 + floor(4 x): 1, 2, 3, 4, and 5 for the layer with the largest eigenvalue."""
    for curvature, factor in ((0.0, 1), (0.249, 1), (0.25, 2), (0.5, 3), (0.999, 4), (1.0, 5)):
        assert list(falls(BitPlan(8, 6, 10), 200, lambda _, c=curvature: c)) == [10, 20 * factor]


def test_the_part_that_is_not_quantized_fades_and_returns_with_each_fall():
    schedule, found = BitSchedule(BitPlan(5, 4, 4, change=0.25)), []
    assert schedule.mix == 1
    for _ in range(9):
        schedule.advance()
        found.append(schedule.mix)
    assert found == [0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25, 0, 0]


def test_without_a_mix_all_is_quantized_from_the_first_step():
    schedule, found = BitSchedule(BitPlan(5, 4, 4, offset=2)), []
    for _ in range(4):
        found.append(schedule.mix)
        schedule.advance()
    assert found == [1, 1, 1, 0]


plans = st.builds(
    lambda target, more, *others: BitPlan(target + more, target, *others),
    st.integers(1, 8), st.integers(0, 6), st.integers(1, 9), st.integers(0, 9), st.sampled_from([0.0, 0.1, 0.3]),
)  # fmt: skip
curvatures = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=60)


@given(plans, curvatures, st.integers(0, 60))
def test_a_state_goes_on_where_it_was_taken(plan, each, cut):
    whole, first, second = BitSchedule(plan), BitSchedule(plan), BitSchedule(plan)
    for curvature in each:
        whole.advance(curvature)
    for curvature in each[:cut]:
        first.advance(curvature)
    second.load(first.state())
    for curvature in each[cut:]:
        second.advance(curvature)
    assert second.state() == whole.state() and second.mix == whole.mix


@given(plans, plans, st.integers(0, 100))
def test_another_plan_is_where_it_would_be_after_as_many_steps(old, new, steps):
    before, loaded, alone = BitSchedule(old), BitSchedule(new), BitSchedule(new)
    for _ in range(steps):
        before.advance(0.5 if old != new else None)
        alone.advance()
    loaded.load(before.state())
    assert loaded.state() == alone.state()


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"start_bits is 4 and target_bits 8; bits only fall"):
        BitSchedule(BitPlan(4, 8, 1))
    schedule = BitSchedule(BitPlan(8, 4, 1))
    for now in (None, [1, 2, 3], [1, 2, 3, -1], [1, 2, 3, 0.5], [1, 2, 3, True]):
        with pytest.raises(ConfigError, match="the state of a schedule of bits is"):
            schedule.load({"now": now})
    with pytest.raises(ConfigError, match="the state of a schedule of bits is"):
        schedule.load([1, 2, 3, 4])
    plan = schedule.state()["plan"]
    for now in ([9, 3, 4, 1], [9, 9, 4, 1], [9, 0, 4, 1], [9, 6, 0, 1], [9, 6, 4, 10], [10**400, 6, 4, 10**400]):
        with pytest.raises(ConfigError, match="which no schedule comes to"):
            schedule.load({"plan": plan, "now": now})
    schedule.load({"plan": plan, "now": [9, 6, 4, 1]})
    assert schedule.bits == 6
