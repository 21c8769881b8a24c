"""Loss scales against the trajectories that the configuration's specification lists."""

from __future__ import annotations

import json

import pytest

from mpispeed.base.errors import ConfigError, PrecisionError
from mpispeed.precision import DynamicScale, StaticScale


def trajectory(scale: DynamicScale, flags: str) -> list[float]:
    values = []
    for flag in flags:
        scale.update(flag == "T")
        values.append(scale.scale)
    return values


@pytest.mark.parametrize(
    ("flags", "options", "expected"),
    [
        ("FFFFFFF", {"loss_scale_window": 2}, [256, 512, 512, 1024, 1024, 2048, 2048]),
        ("TTFFFTFFF", {"loss_scale_window": 2}, [256, 128, 128, 256, 256, 256, 256, 512, 512]),
        ("TFTT", {}, [256, 256, 128, 64]),
        ("TFTT", {"consecutive_hysteresis": True}, [256, 256, 256, 128]),
        ("TTTT", {"hysteresis": 1}, [128, 64, 32, 16]),
        ("TTTT", {"hysteresis": 3}, [256, 256, 128, 64]),
    ],
)
def test_dynamic_trajectories(flags: str, options: dict[str, int], expected: list[float]) -> None:
    assert trajectory(DynamicScale(8, **options), flags) == expected


def test_defaults_are_those_of_the_table() -> None:
    scale = DynamicScale()
    assert (scale.loss_scale, scale.cur_scale, scale.cur_iter) == (65536.0, 65536.0, 0)
    assert (scale.scale_window, scale.min_loss_scale, scale.hysteresis) == (1000, 1, 2)
    assert scale.dynamic is True
    assert scale.consecutive_hysteresis is False


def test_growth_needs_exactly_the_window_after_an_overflow() -> None:
    scale = DynamicScale(8, loss_scale_window=1000, hysteresis=1)
    scale.update(True)
    values = trajectory(scale, "F" * 2000)
    assert values[998] == 128
    assert values[999] == 256
    assert values[1998] == 256
    assert values[1999] == 512


def test_overflow_at_the_minimum_is_an_error_on_all_ranks() -> None:
    scale = DynamicScale(2, hysteresis=1, min_loss_scale=3)
    scale.update(True)
    assert scale.scale == 3  # halving would give 2
    with pytest.raises(PrecisionError, match="minimum of 3") as caught:
        scale.update(True)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.is_collective


def test_a_scale_that_goes_on_stays_at_its_minimum_and_tells() -> None:
    scale = DynamicScale(2, loss_scale_window=2, hysteresis=1, min_loss_scale=3, goes_on=True)
    assert not scale.is_exhausted
    assert trajectory(scale, "TTT") == [3, 3, 3]
    assert scale.is_exhausted
    assert trajectory(scale, "FF") == [3, 6]
    assert not scale.is_exhausted
    scale.update(True)
    assert (scale.scale, scale.is_exhausted) == (3, False)


def test_credit_protects_at_the_minimum() -> None:
    scale = DynamicScale(0, hysteresis=2)
    scale.update(True)
    assert scale.scale == 1
    with pytest.raises(PrecisionError):
        scale.update(True)


def test_static_scale_is_kept_exactly() -> None:
    scale = StaticScale(138.0)
    for overflow in (False, True, True, False):
        scale.update(overflow)
    assert scale.loss_scale == 138.0
    assert scale.dynamic is False
    assert scale.cur_iter == 4


@pytest.mark.parametrize("cut", range(10))
@pytest.mark.parametrize("is_consecutive", [False, True])
def test_state_goes_on_where_it_stopped(cut: int, is_consecutive: bool) -> None:
    flags = "TFTFFTTFFF"

    def fresh() -> DynamicScale:
        return DynamicScale(12, loss_scale_window=3, consecutive_hysteresis=is_consecutive)

    whole, first, second = fresh(), fresh(), fresh()
    expected = trajectory(whole, flags)
    head = trajectory(first, flags[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + trajectory(second, flags[cut:]) == expected
    assert second.state_dict() == whole.state_dict()


def test_state_of_the_other_kind_is_left_aside() -> None:
    dynamic, static = DynamicScale(4), StaticScale(5.0)
    dynamic.update(False)
    static.update(False)
    other_dynamic, other_static = DynamicScale(6), StaticScale(7.0)
    other_dynamic.load_state_dict(static.state_dict())
    other_static.load_state_dict(dynamic.state_dict())
    assert (other_dynamic.scale, other_dynamic.cur_iter) == (64.0, 0)
    assert (other_static.scale, other_static.cur_iter) == (7.0, 0)
    other_static.load_state_dict(static.state_dict())
    assert (other_static.scale, other_static.cur_iter) == (5.0, 1)


@pytest.mark.parametrize(
    "options", [{"loss_scale_window": 0}, {"hysteresis": 0}, {"min_loss_scale": 0}, {"min_loss_scale": -1}]
)
def test_impossible_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        DynamicScale(**options)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_static_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(ConfigError, match="loss_scale"):
        StaticScale(scale)
