"""The five schedules against the tables of their specification, to 1e-8, and their common contract."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UnknownOption, UsageError
from mpispeed.optim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from mpispeed.optim.schedule import SCHEDULES, Schedule, build_schedule


def adam(*lrs: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (1.0,)]
    return torch.optim.Adam(groups)


def table(schedule: Schedule, count: int) -> list[float]:
    """The lr written into the first group at index -1 and after each of `count` steps."""
    values = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(count):
        schedule.step()
        values.append(schedule.optimizer.param_groups[0]["lr"])
        assert schedule.get_lr()[0] == values[-1] == schedule.get_last_lr()[0]
    return values


def is_rising(values: list[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def is_falling(values: list[float]) -> bool:
    return all(a > b for a, b in itertools.pairwise(values))


WARMUP = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_num_steps": 5}
CYCLE = {
    "cycle_min_lr": 0.1,
    "cycle_max_lr": 1.0,
    "cycle_first_step_size": 4,
    "decay_step_size": 2,
    "decay_lr_rate": 1,
}
RANGE = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
COSINE = {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}

L5 = [math.log(i) / math.log(5) for i in range(1, 6)]
COS = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(1, 7)]

# Exact values beside the rounded ones of the specification, which the next test compares.
GOLDEN: list[tuple[type[Schedule], dict[str, Any], list[float]]] = [
    (LRRangeTest, RANGE, [0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035]),
    (LRRangeTest, {**RANGE, "lr_range_test_staircase": True}, [0.001, 0.001, 0.002, 0.002, 0.003, 0.003]),
    (
        OneCycle,
        CYCLE,
        [0.1, 0.325, 0.55, 0.775, 1, 0.775, 0.55, 0.325, 0.1, *(0.1 / (1 + d / 2) for d in range(1, 7))],
    ),
    (WarmupLR, WARMUP, [0.1, *(0.1 + 0.1 * x for x in L5), 0.2, 0.2]),
    (WarmupLR, {**WARMUP, "warmup_type": "linear"}, [0.1, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.2]),
    (
        WarmupDecayLR,
        {**WARMUP, "total_num_steps": 10},
        [0.1, *(0.1 + 0.1 * x for x in L5), 0.2, 0.18, 0.16, 0.14, 0.12, 0.1, 0.1],
    ),
    (WarmupCosineLR, COSINE, [0, *(0.2 + 0.8 * math.log(i) / math.log(4) for i in range(1, 5)), *COS, 0.1, 0.1]),
    (WarmupCosineLR, {**COSINE, "warmup_type": "linear"}, [0, 0.2, 0.4, 0.6, 0.8, *COS, 0.1]),
]


@pytest.mark.parametrize(("cls", "params", "expected"), GOLDEN)
def test_golden_tables(cls: type[Schedule], params: dict[str, Any], expected: list[float]) -> None:
    values = table(cls(adam(), **params), len(expected) - 1)
    assert values == pytest.approx(expected, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(
    ("index", "rounded"),
    [
        (2, ".1 .325 .55 .775 1 .775 .55 .325 .1 .06667 .05 .04 .03333 .02857 .025"),
        (3, ".1 .1 .14307 .16826 .18614 .2 .2 .2"),
        (5, ".1 .1 .14307 .16826 .18614 .2 .2 .18 .16 .14 .12 .1 .1"),
        (6, "0 .2 .6 .83399 1 .93971 .775 .55 .325 .16029 .1"),
        (7, "0 .2 .4 .6 .8 .93971 .775 .55 .325 .16029 .1"),
    ],
)
def test_tables_as_printed(index: int, rounded: str) -> None:
    cls, params, _ = GOLDEN[index]
    printed = [float(word) for word in rounded.split()]
    assert [round(value, 5) for value in table(cls(adam(), **params), len(printed) - 1)] == printed


MOMENTUM = {**CYCLE, "decay_mom_rate": 0.1, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9}


def test_one_cycle_momentum(caplog: pytest.LogCaptureFixture) -> None:
    schedule = OneCycle(adam(1.0, 2.0), **MOMENTUM)
    values = []
    for _ in range(12):
        schedule.step()
        mom = schedule.get_mom()
        assert mom == [group["betas"] for group in schedule.optimizer.param_groups]
        assert {second for _, second in mom} == {0.99}
        values.append(mom[0][0])
    formula = [0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945, 0.99, 1.035, 1.08]
    assert values[:10] == pytest.approx(formula[:10], rel=1e-8)
    assert values[10:] == [0.999, 0.999]  # the formula passes 1 there
    assert "decay_mom_rate" in caplog.text


def test_one_cycle_starts_with_the_largest_momentum() -> None:
    schedule = OneCycle(adam(), **MOMENTUM)
    assert schedule.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    assert schedule.get_mom() == [(0.9, 0.99)]
    assert schedule.get_lr() == [0.1] == [schedule.optimizer.param_groups[0]["lr"]]


def test_one_cycle_without_betas_leaves_momentum_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.7)
    schedule = OneCycle(optimizer, **MOMENTUM)
    schedule.step()
    assert schedule.get_mom() is None
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert "betas" not in optimizer.param_groups[0]
    assert "no betas" in caplog.text
    assert OneCycle(adam(), 0.1, 1.0, cycle_momentum=False).get_mom() is None


def test_one_cycle_parts_of_unequal_length_and_ignored_stairs() -> None:
    params = {**CYCLE, "cycle_first_step_size": 2, "cycle_second_step_size": 3, "decay_step_size": 0}
    values = table(OneCycle(adam(), cycle_first_stair_count=3, cycle_second_stair_count=2, **params), 7)
    assert values == pytest.approx([0.1, 0.55, 1.0, 0.7, 0.4, 0.1, 0.1, 0.1])
    short = {**CYCLE, "cycle_second_step_size": -1}
    assert table(OneCycle(adam(), **short), 12) == table(OneCycle(adam(), **CYCLE), 12)


@pytest.mark.parametrize(
    ("low", "high", "rate", "size", "decay"),
    [(1e-5, 1e-2, 1e-3, 10, 10), (1e-3, 1e-1, 0, 21, 21), (1e-3, 1e-1, 1e-1, 21, 21), (1e-5, 1e-1, 0, 10, 0)],
)
def test_one_cycle_shape(low: float, high: float, rate: float, size: int, decay: int) -> None:
    schedule = OneCycle(
        adam(), low, high, decay_lr_rate=rate, cycle_first_step_size=size, decay_step_size=decay, cycle_momentum=False
    )
    values = table(schedule, 4 * size)
    assert values[0] == low
    assert values[size] == high
    assert is_rising(values[: size + 1])
    assert is_falling(values[size : 2 * size + 1])
    tail = values[2 * size :]
    if rate > 0:
        assert is_falling(tail)
    else:
        assert set(tail) == {low}


@pytest.mark.parametrize(("low", "high", "rate", "size"), [(0.08, 0.09, 1e-3, 10), (0.08, 0.09, 0, 21)])
def test_one_cycle_momentum_shape(low: float, high: float, rate: float, size: int) -> None:
    schedule = OneCycle(
        adam(),
        1e-3,
        1e-2,
        cycle_first_step_size=size,
        decay_step_size=size,
        cycle_min_mom=low,
        cycle_max_mom=high,
        decay_mom_rate=rate,
    )
    values = [schedule.get_mom()[0][0]]
    for _ in range(3 * size):
        schedule.step()
        values.append(schedule.get_mom()[0][0])
    assert values[0] == high
    assert values[size] == low
    assert is_falling(values[: size + 1])
    assert is_rising(values[size : 2 * size + 1])
    tail = values[2 * size :]
    assert is_rising(tail) if rate else set(tail) == {high}


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("steps", [10, 15, 19, 33])
def test_warmup_ends_exactly_at_the_maximum(steps: int, warmup_type: str) -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_num_steps": steps, "warmup_type": warmup_type}
    values = table(WarmupLR(adam(), **params), 3 * steps)
    assert values[1] == 0.1
    assert set(values[steps + 1 :]) == {0.2}
    decayed = table(WarmupDecayLR(adam(), total_num_steps=2 * steps, **params), 2 * steps + 1)
    assert decayed[: steps + 2] == values[: steps + 2]
    falling = decayed[steps + 1 :]
    assert is_falling(falling)
    assert falling[-1] == 0.1


@pytest.mark.parametrize(
    ("low", "rate", "size", "is_staircase"),
    [
        (1e-4, 1e-5, 1, True),
        (1e-5, 1e-5, 1, False),
        (1e-4, 1e-3, 10, True),
        (1e-3, 1e-3, 10, False),
        (1e-2, 1e-2, 19, True),
        (1e-2, 1e-2, 19, False),
    ],
)
def test_range_test_shape(low: float, rate: float, size: int, is_staircase: bool) -> None:
    values = table(LRRangeTest(adam(), low, size, rate, is_staircase), 5 * size)
    assert values[0] == low
    if is_staircase:
        blocks = [set(values[at : at + size]) for at in range(0, 5 * size, size)]
        assert all(len(block) == 1 for block in blocks)
        assert len(set.union(*blocks)) == 5
    else:
        assert is_rising(values)


@pytest.mark.parametrize(
    ("total", "warmup", "end", "start"),
    [(100, 10, 0.1, 0.2), (200, 20, 0.1, 0.2), (500, 30, 0, 0.2), (600, 300, 0.1, 0), (600, 550, 0, 0)],
)
def test_cosine_shape(total: int, warmup: int, end: float, start: float) -> None:
    lr = 1.5e-3
    values = table(WarmupCosineLR(adam(lr), total, start, warmup, end), total + 10)[1:]
    assert values[0] == pytest.approx(lr * start, abs=1e-7)
    assert values[warmup - 1] == pytest.approx(lr, abs=1e-7)
    assert values[total - 1] == pytest.approx(lr * end, abs=1e-7)
    assert is_rising(values[:warmup])
    assert is_falling(values[warmup:total])
    assert set(values[total - 1 :]) == {lr * end}  # held, where the cosine alone would turn up again


def test_cosine_writes_all_groups_and_keeps_their_ratios() -> None:
    schedule = WarmupCosineLR(adam(1.0, 0.5, 2.0), **COSINE)
    assert [group["lr"] for group in schedule.optimizer.param_groups] == [0.0, 0.0, 0.0]
    schedule.step(3)
    assert schedule.get_lr() == [1.0, 0.5, 2.0]


@pytest.mark.parametrize("total", [4, 3, 0])
def test_totals_within_the_warmup(total: int, caplog: pytest.LogCaptureFixture) -> None:
    cosine = WarmupCosineLR(adam(), **{**COSINE, "total_num_steps": total})
    decay = WarmupDecayLR(adam(), total, 0.1, 0.2, 4)
    assert table(cosine, 7)[5:] == [0.1, 0.1, 0.1]
    if total < 4:
        assert table(decay, 7)[5:] == [0.1, 0.1, 0.1]
        assert caplog.text.count("less than the 4 steps of warm-up") == 2
    else:
        assert "less than" not in caplog.text


@pytest.mark.parametrize("cls", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_unknown_warmup_type_means_log(cls: type[Schedule], caplog: pytest.LogCaptureFixture) -> None:
    params = {} if cls is WarmupLR else {"total_num_steps": 20}
    odd = table(cls(adam(), warmup_num_steps=5, warmup_type="cubic", **params), 12)
    assert odd == table(cls(adam(), warmup_num_steps=5, **params), 12)
    assert "'cubic'" in caplog.text


@pytest.mark.parametrize("steps", [-3, 0, 1, 2])
def test_warmup_takes_two_steps_at_least(steps: int) -> None:
    assert table(WarmupLR(adam(), 0.0, 1.0, steps), 4) == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_values_per_group() -> None:
    schedule = WarmupLR(adam(1.0, 1.0), [0.1, 0.3], (0.2, 0.5), 2)
    assert [group["lr"] for group in schedule.optimizer.param_groups] == [0.1, 0.3]
    schedule.step(2)
    assert schedule.get_lr() == [0.2, 0.5]
    schedule = LRRangeTest(adam(1.0, 1.0), [1.0, 2.0], 1, 1.0)
    schedule.step()
    assert schedule.get_lr() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("cls", "params"),
    [
        (LRRangeTest, {"lr_range_test_min_lr": [0.1]}),
        (WarmupLR, {"warmup_min_lr": [0.1, 0.1, 0.1]}),
        (WarmupLR, {"warmup_max_lr": (0.1,)}),
        (WarmupDecayLR, {"total_num_steps": 5, "warmup_max_lr": []}),
    ],
)
def test_lists_of_another_length_are_refused(cls: type[Schedule], params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="2 parameter groups"):
        cls(adam(1.0, 1.0), **params)


MAKERS: list[Callable[..., Schedule]] = [
    lambda optimizer, **i: LRRangeTest(optimizer, **RANGE, **i),
    lambda optimizer, **i: OneCycle(optimizer, **MOMENTUM, **i),
    lambda optimizer, **i: WarmupLR(optimizer, **WARMUP, **i),
    lambda optimizer, **i: WarmupDecayLR(optimizer, **WARMUP, total_num_steps=9, **i),
    lambda optimizer, **i: WarmupCosineLR(optimizer, **COSINE, **i),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("stop", range(14))
def test_resume_at_every_index_gives_the_same_tail(make: Callable[..., Schedule], stop: int) -> None:
    whole, first, second = make(adam(1.0, 0.5)), make(adam(1.0, 0.5)), make(adam(1.0, 0.5))
    for _ in range(stop):
        whole.step()
        first.step()
    assert first.state_dict() == {"last_batch_iteration": stop - 1}
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[1]["lr"] == whole.get_lr()[1]
    assert second.get_last_lr() == whole.get_lr()
    for _ in range(6):
        whole.step()
        second.step()
        for group, expected in zip(second.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
            assert (group["lr"], group["betas"]) == (expected["lr"], expected["betas"])


@pytest.mark.parametrize("make", MAKERS)
def test_jumps_equal_single_steps(make: Callable[..., Schedule]) -> None:
    walked, jumped = make(adam()), make(adam())
    for _ in range(8):
        walked.step()
    jumped.step(7)
    assert jumped.get_lr() == walked.get_lr()
    jumped.step(2)
    jumped.step()
    assert jumped.state_dict() == {"last_batch_iteration": 3}
    assert jumped.get_lr() == pytest.approx(table(make(adam()), 4)[-1:])


@pytest.mark.parametrize("make", MAKERS)
def test_construction_in_the_middle_leaves_the_optimizer_alone(make: Callable[..., Schedule]) -> None:
    optimizer = adam(0.7)
    schedule = make(optimizer, last_batch_iteration=3)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.7, (0.9, 0.999))
    with pytest.raises(AssertionError, match=r"need to call step\(\) first") as caught:
        schedule.get_last_lr()
    assert isinstance(caught.value, UsageError)
    schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 4}
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("make", MAKERS)
def test_lr_before_training_is_that_of_the_groups(make: Callable[..., Schedule]) -> None:
    schedule = make(adam(1.0, 0.5))
    for _ in range(3):
        assert schedule.get_lr() == [group["lr"] for group in schedule.optimizer.param_groups]
    assert schedule.state_dict() == {"last_batch_iteration": -1}
    if isinstance(schedule, OneCycle):
        with pytest.raises(UsageError, match="step"):
            schedule.get_last_lr()
    else:
        assert schedule.get_last_lr() == schedule.get_lr()


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize("make", MAKERS)
def test_optimizer_argument(make: Callable[..., Schedule]) -> None:
    optimizer = adam()
    assert make(Wrapper(optimizer)).optimizer is optimizer
    for wrong in (None, Wrapper(None), Wrapper(Wrapper(optimizer)), nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
            make(wrong)


def test_build_finds_own_names_and_drops_auto() -> None:
    assert set(SCHEDULES) == {"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 7}
    schedule = build_schedule("WarmupLR", params, adam())
    assert isinstance(schedule, WarmupLR)
    assert (schedule.min_lrs, schedule.max_lrs, schedule.warmup_num_steps) == ([0.0], [0.001], 7)
    assert params["warmup_min_lr"] == "auto"
    assert isinstance(build_schedule("LRRangeTest", None, Wrapper(adam())), LRRangeTest)


def test_build_finds_schedules_of_torch() -> None:
    optimizer = adam(1.0)
    schedule = build_schedule("StepLR", {"step_size": 1, "gamma": 0.5, "last_epoch": "auto"}, Wrapper(optimizer))
    assert type(schedule) is torch.optim.lr_scheduler.StepLR
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["warmuplr", "LRScheduler", "Counter", "_LRScheduler", "Optimizer", "Nope"])
def test_build_refuses_unknown_names(name: str) -> None:
    with pytest.raises(AssertionError, match=r"scheduler\.type") as caught:
        build_schedule(name, {}, adam())
    assert isinstance(caught.value, ConfigError)


def test_build_suggests_a_name_in_its_spelling() -> None:
    with pytest.raises(ConfigError, match='Did you mean "WarmupLR"'):
        build_schedule("warmuplr", {}, adam())


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize(("params", "why"), [({}, "is missing"), ({"total_num_steps": "auto"}, "is left at 'auto'")])
def test_build_needs_the_total(name: str, params: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"total_num_steps {why}"):
        build_schedule(name, params, adam())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLR", {"warmup_num_step": 3}, 'Did you mean "warmup_num_steps"'),
        ("StepLR", {"step_size": 1, "gama": 0.5}, 'Did you mean "gamma"'),
        ("WarmupLR", {"optimizer": 1}, "'optimizer'"),
    ],
)
def test_build_refuses_unknown_params(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownOption, match=message):
        build_schedule(name, params, adam())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("OneCycle", {"cycle_min_lr": 0.1}, "'cycle_max_lr'"),
        ("StepLR", {}, "'step_size'"),
        ("OneCycle", {"cycle_min_lr": [0.1], "cycle_max_lr": 1.0}, "cycle_min_lr"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "decay_step_size": -1}, "decay_step_size"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("WarmupLR", {"warmup_max_lr": "fast"}, "warmup_max_lr"),
        ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps"),
    ],
)
def test_build_refuses_missing_and_impossible_params(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_schedule(name, params, adam())


def test_skipped_steps_do_not_advance_it(caplog: pytest.LogCaptureFixture) -> None:
    schedule = WarmupLR(adam(), **WARMUP)
    for is_skipped in (True, True, False, True, False):
        if not is_skipped:
            schedule.step()
        schedule.get_lr()
    assert schedule.state_dict() == {"last_batch_iteration": 1}
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []
