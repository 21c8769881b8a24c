"""What holds for schedules and loss scales at any settings."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpispeed.optim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from mpispeed.optim.schedule import Schedule
from mpispeed.precision import DynamicScale

lrs = st.floats(1e-8, 10.0)
sizes = st.integers(1, 60)
indices = st.integers(-1, 200)
warmups = st.fixed_dictionaries(
    {"warmup_num_steps": st.integers(0, 60), "warmup_type": st.sampled_from(["log", "linear"])}
)


def optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=lr)


def value_at(schedule: Schedule, index: int) -> float:
    schedule.step(index)
    assert schedule.state_dict() == {"last_batch_iteration": index}
    lr: float = schedule.optimizer.param_groups[0]["lr"]
    assert schedule.get_lr() == schedule.get_last_lr() == [lr]
    return lr


def is_within(value: float, low: float, high: float) -> bool:
    slack = 1e-12 * max(abs(low), abs(high))
    return low - slack <= value <= high + slack


@settings(deadline=None)
@given(lrs, lrs, warmups, st.integers(0, 120), indices)
def test_warmups_stay_between_their_ends(low: float, high: float, warmup: dict[str, Any], total: int, i: int) -> None:
    low, high = sorted((low, high))
    warm = value_at(WarmupLR(optimizer(), low, high, **warmup), i)
    decayed = value_at(WarmupDecayLR(optimizer(), total, low, high, **warmup), i)
    assert is_within(warm, low, high)
    assert is_within(decayed, low, high)
    steps = max(2, warmup["warmup_num_steps"])
    if i < steps:
        assert warm == decayed
    else:
        assert warm == high
    if i >= max(steps, total):
        assert decayed == low


@settings(deadline=None)
@given(lrs, warmups, st.floats(0, 1), st.floats(0, 1), st.integers(0, 120), indices)
def test_cosine_stays_below_the_base_and_ends_at_its_share(
    lr: float, warmup: dict[str, Any], start: float, end: float, total: int, i: int
) -> None:
    schedule = WarmupCosineLR(optimizer(lr), total, start, cos_min_ratio=end, **warmup)
    value = value_at(schedule, i)
    assert is_within(value, 0.0, lr)
    if i >= max(2, warmup["warmup_num_steps"], total - 1):
        assert value == lr * end
    if i == -1:
        assert value == 0.0


@settings(deadline=None)
@given(lrs, lrs, sizes, sizes, st.integers(0, 9), st.floats(0, 2), st.floats(0, 2), indices)
def test_one_cycle_bounds_and_ends(
    low: float, high: float, first: int, second: int, decay: int, lr_rate: float, mom_rate: float, i: int
) -> None:
    low, high = sorted((low, high))
    schedule = OneCycle(
        optimizer(),
        low,
        high,
        lr_rate,
        first,
        second,
        decay_step_size=decay,
        decay_mom_rate=mom_rate,
    )
    value = value_at(schedule, i)
    assert is_within(value, 0.0 if i >= first + second else low, high)
    ((beta, second_beta),) = schedule.get_mom() or ()
    assert 0.8 - 1e-12 <= beta < 1.0
    assert second_beta == 0.99
    assert schedule.optimizer.param_groups[0]["betas"] == (beta, 0.99)
    assert value_at(schedule, first - 1) == high
    assert math.isclose(value_at(schedule, first + second - 1), low, rel_tol=1e-12)


@settings(deadline=None)
@given(lrs, sizes, st.floats(0, 5), indices)
def test_staircase_meets_the_line_at_the_starts_of_blocks(low: float, size: int, rate: float, i: int) -> None:
    line, stairs = (LRRangeTest(optimizer(), low, size, rate, flag) for flag in (False, True))
    assert value_at(stairs, i) <= value_at(line, i)
    block_start = (i + 1) // size * size - 1
    assert value_at(stairs, i) == value_at(line, block_start)


@given(st.lists(st.booleans(), max_size=80), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_dynamic_scale_stays_a_power_of_two_and_splits_anywhere(
    flags: list[bool], window: int, hysteresis: int, is_consecutive: bool
) -> None:
    def fresh() -> DynamicScale:
        return DynamicScale(100, window, hysteresis, is_consecutive)

    whole, first, second = fresh(), fresh(), fresh()
    for flag in flags:
        whole.update(flag)
        assert math.frexp(whole.scale)[0] == 0.5
    cut = len(flags) // 2
    for flag in flags[:cut]:
        first.update(flag)
    second.load_state_dict(first.state_dict())
    for flag in flags[cut:]:
        second.update(flag)
    assert second.state_dict() == whole.state_dict()
    assert whole.cur_iter == len(flags)
