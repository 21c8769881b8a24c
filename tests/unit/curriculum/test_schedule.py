"""Schedules: golden values, exact floors against whole-number arithmetic and against DeepSpeed's formula in floats."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum import CurriculumScheduler, truncate


def scheduler(kind, low, high, **numbers):
    config = {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": numbers}
    return CurriculumScheduler(config, warns=False)


def growth(kind, low, high, total, multiple, **numbers):
    return scheduler(kind, low, high, total_curriculum_step=total, difficulty_step=multiple, **numbers)


def followed(schedule, steps):
    return [schedule.update_difficulty(step) for step in steps]


def test_linear_growth():
    schedule = growth("fixed_linear", 2, 10, 8, 2)
    assert schedule.get_current_difficulty() == 2
    assert followed(schedule, range(1, 11)) == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
    assert schedule.get_current_difficulty() == 10


def test_discrete_levels():
    schedule = scheduler("fixed_discrete", 1, 5, difficulty=[1, 2, 3, 4, 5], max_step=[2, 4, 6, 8])
    assert followed(schedule, range(1, 13)) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5]


@pytest.mark.parametrize(
    ("kind", "numbers", "wanted"),
    [("fixed_linear", {}, (128, 392, 1056)), ("fixed_root", {"root_degree": 2}, (424, 872, 1464))],
)
def test_long_growth(kind, numbers, wanted):
    schedule = growth(kind, 64, 2048, 30000, 8, **numbers)
    assert tuple(map(schedule.difficulty_at, (1000, 5000, 15000))) == wanted
    assert schedule.difficulty_at(30000) == 2048


def formula(step, low, high, total, multiple, degree):
    """DeepSpeed's, in floats, and the value before its floor."""
    value = (step / total) ** (1.0 / degree) * (high - low) + low
    found = math.floor(value)
    return min(found - found % multiple, high), value


@given(
    st.integers(0, 3000), st.integers(0, 300), st.integers(0, 3000), st.integers(1, 2000), st.integers(1, 64),
    st.sampled_from([1, 2, 3, 0.5, 1.5, 2.3, 7, math.pi]),
)  # fmt: skip
def test_growth_is_deepspeeds_where_floats_decide_it(step, low, grown, total, multiple, degree):
    high = low + grown
    found = growth("fixed_root", low, high, total, multiple, root_degree=degree).difficulty_at(step)
    assert low <= found <= high
    theirs, value = formula(step, low, high, total, multiple, degree)
    if abs(value - round(value)) > 1e-9 * max(1.0, value):
        assert found == max(low, theirs)


@given(st.integers(0, 10**6), st.integers(0, 10**12), st.integers(1, 10**6), st.sampled_from([1, 2, 3, 5, 1.5, 2.5]))
def test_floors_are_exact(step, grown, total, degree):
    """k is the floor of x if k <= x < k + 1, by powers of whole numbers."""
    found = growth("fixed_root", 0, 10**30, total, 1, root_degree=degree)
    # the maximum is far away: what is compared is the root alone
    k = growth("fixed_root", 0, grown, total, 1, root_degree=degree).difficulty_at(min(step, total))
    power, root = Fraction(degree).denominator, Fraction(degree).numerator
    bound = min(step, total) ** power * grown**root
    assert k**root * total**power <= bound
    assert k == grown or bound < (k + 1) ** root * total**power
    assert found.difficulty_at(0) == 0


def test_floats_miss_a_boundary_and_we_do_not():
    """0.29 * 100 is 28.999999999999996 in floats."""
    assert formula(29, 0, 100, 100, 1, 1)[0] == 28
    assert growth("fixed_linear", 0, 100, 100, 1).difficulty_at(29) == 29
    cubes = growth("fixed_root", 0, 1000, 1000**3, 1, root_degree=3)
    assert [cubes.difficulty_at(k**3) for k in range(1001)] == list(range(1001))
    assert [cubes.difficulty_at(k**3 - 1) for k in range(1, 1001)] == list(range(1000))


def test_difficulties_are_clamped():
    """The minimum is no multiple; the maximum comes where the next multiple would."""
    schedule = growth("fixed_linear", 5, 20, 15, 8)
    assert [schedule.difficulty_at(step) for step in (-3, 0, 2, 3, 11, 15, 18, 19, 1000)] == [
        5, 5, 5, 8, 16, 16, 16, 20, 20,
    ]  # fmt: skip


def test_equal_bounds():
    schedule = growth("fixed_root", 64, 64, 10, 8, root_degree=2)
    assert followed(schedule, range(5)) == [64] * 5


def test_a_custom_function(caplog):
    schedule = CurriculumScheduler({"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "custom"})
    with pytest.raises(UsageError, match="set_custom_curriculum_learning_schedule"):
        schedule.update_difficulty(1)
    schedule.set_custom_get_difficulty(lambda step: torch.tensor(4 * step))
    assert followed(schedule, (1, 2, 3, 5)) == [8, 8, 12, 20]
    assert caplog.text.count("gave the difficulty 4, outside of min_difficulty 8") == 1
    assert followed(schedule, (16, 2)) == [64, 64]  # the maximum stays
    schedule.set_current_difficulty(8)
    schedule.set_custom_get_difficulty(lambda step: step / 2)
    with pytest.raises(UsageError, match=r"gave 1\.0; expected a whole number"):
        schedule.update_difficulty(2)


def test_a_function_needs_schedule_type_custom():
    schedule = growth("fixed_linear", 8, 16, 4, 8)
    with pytest.raises(UsageError, match="it is fixed_linear"):
        schedule.set_custom_get_difficulty(lambda step: 8)


def test_states():
    schedule = growth("fixed_linear", 8, 64, 100, 8)
    schedule.update_difficulty(50)
    state = schedule.get_state()
    assert state == {
        "current_difficulty": 32, "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
    }  # fmt: skip
    other = growth("fixed_linear", 8, 64, 100, 8)
    other.set_state(state)
    assert other.get_current_difficulty() == 32
    longer = growth("fixed_linear", 8, 128, 100, 8)
    longer.load_state_dict({**state, "current_difficulty": 64})
    assert longer.update_difficulty(51) == 64  # 69.2, by the new schedule: it did not stay at the old maximum
    assert longer.update_difficulty(61) == 80
    with pytest.raises(UsageError, match="needs current_difficulty, and has nothing"):
        other.set_state({})
    with pytest.raises(UsageError, match=r"set_current_difficulty\(65\): outside"):
        other.set_current_difficulty(65)


GOOD = {
    "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2},
}  # fmt: skip
LEVELS = {"schedule_type": "fixed_discrete"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_difficulty": None}, "needs min_difficulty"),
        ({"max_difficulty": 4}, "min_difficulty 8 is more than max_difficulty 4"),
        ({"max_difficulty": 64.5}, "max_difficulty of curriculum learning is 64.5"),
        ({"schedule_type": "sometimes"}, "'sometimes' of curriculum learning is unknown; use one of fixed_linear"),
        ({"schedule_config": {"root_degree": 2}}, "needs total_curriculum_step and difficulty_step"),
        ({"schedule_config": {**GOOD["schedule_config"], "difficulty_step": 0}}, "difficulty_step .* is 0"),
        ({"schedule_config": {**GOOD["schedule_config"], "root_degree": "much"}}, "root_degree is 'much'"),
        ({**LEVELS, "schedule_config": {"difficulty": [8, 16], "max_step": []}}, "0 entries for 2"),
        ({**LEVELS, "schedule_config": {"difficulty": [8, 16], "max_step": [1, 2]}}, "2 entries for 2"),
        ({**LEVELS, "schedule_config": {"difficulty": [8, 128], "max_step": [1]}}, "128 is outside"),
        ({**LEVELS, "schedule_config": {"difficulty": [8, 16, 32], "max_step": [5, 2]}}, "has 5 before a smaller"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        CurriculumScheduler({**GOOD, **change})
    with pytest.raises(AssertionError):  # as scripts catch it
        CurriculumScheduler({**GOOD, **change})


def test_an_unknown_schedule_is_a_runtime_error():
    with pytest.raises(RuntimeError):
        CurriculumScheduler({**GOOD, "schedule_type": "sometimes"})


@pytest.mark.parametrize(("multiple", "warnings"), [(8, 0), (16, 0), (12, 1)])
def test_a_warning_of_lengths_that_are_slow(caplog, multiple, warnings):
    CurriculumScheduler({**GOOD, "schedule_config": {**GOOD["schedule_config"], "difficulty_step": multiple}})
    assert caplog.text.count("is no multiple of 8") == warnings


def test_truncation():
    ids, labels = torch.arange(12).view(2, 6), torch.tensor([1, 0])
    batch = {"ids": ids, "rest": [labels, (torch.zeros(2, 6, 3), "name")]}
    cut = truncate(batch, 4)
    assert torch.equal(cut["ids"], ids[:, :4])
    assert cut["ids"].is_contiguous()
    assert cut["rest"][0] is labels
    assert cut["rest"][1][0].shape == (2, 4, 3)
    assert truncate(batch, 6)["ids"] is ids
    assert truncate(ids, 1, dim=0).shape == (1, 6)
    with pytest.raises(UsageError, match="at least 1"):
        truncate(batch, 0)
