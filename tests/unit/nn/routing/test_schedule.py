"""The schedule of random-LTD: lengths at exact steps, layer tokens, state."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError, UnimplementedOption
from mpispeed.nn.routing import RandomLTDScheduler

CONFIG = {
    "total_layer_num": 24,
    "random_ltd_layer_num": 22,
    "global_batch_size": 4,
    "random_ltd_schedule": {
        "min_value": 128,
        "max_value": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 200000, "seq_per_step": 16},
    },
}


def config(least=128, most=2048, steps=200000, multiple=16, **others):
    numbers = {"require_steps": steps, "seq_per_step": multiple}
    schedule = {"min_value": least, "max_value": most, "schedule_type": "fixed_linear", "schedule_config": numbers}
    return {**copy.deepcopy(CONFIG), "random_ltd_schedule": schedule, **others}


def test_lengths_of_the_documented_schedule():
    scheduler = RandomLTDScheduler(CONFIG)
    found = [scheduler.get_value(step) for step in (0, 1666, 1667, 100000, 199999, 200000, 10**7)]
    assert found == [128, 128, 144, 1088, 2032, 2048, 2048]


@given(st.integers(1, 64), st.integers(0, 200), st.integers(1, 100), st.integers(1, 32), st.integers(0, 300))
def test_lengths_stay_between_the_ends_and_never_fall(least, more, steps, multiple, step):
    scheduler = RandomLTDScheduler(config(least, least + more, steps, multiple))
    now, then = scheduler.get_value(step), scheduler.get_value(step + 1)
    assert least <= now <= then <= least + more
    assert now in (least, least + more) or now % multiple == 0
    assert step < steps or now in (least + more, least + more - (least + more) % multiple, least)


def test_layer_tokens_are_counted_once_for_each_step():
    scheduler = RandomLTDScheduler(config(8, 32, steps=4, multiple=8))
    simulated = [scheduler.get_total_layer_tokens(steps) for steps in range(7)]
    assert scheduler.state["consumed_layer_tokens"] == 0  # nothing was counted by simulating
    lengths = []
    for step in range(6):
        for _ in range(3):  # micro-batches
            scheduler.update_seq(step)
        lengths.append(scheduler.get_current_seq())
        assert scheduler.state["consumed_layer_tokens"] == simulated[step + 1]
    assert lengths == [8, 8, 16, 24, 32, 32]
    assert simulated[1] == 4 * (8 * 22 + 32 * 2)


def test_state_goes_on_in_another_scheduler():
    one, two = RandomLTDScheduler(CONFIG), RandomLTDScheduler({**CONFIG, "global_batch_size": 8})
    for step in range(5000):
        one.update_seq(step)
    two.load_state_dict(one.state_dict())
    assert two.state_dict() == one.state_dict()
    two.update_seq(4999)
    assert two.state_dict() == one.state_dict()
    two.set_current_seq(16)
    two.reset_to_init()
    assert two.get_current_seq() == 128 and two.state["current_steps"] == -1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"total_layer_num": None}, r"total_layer_num is None; random-LTD needs a whole number, 1 or more"),
        ({"total_layer_num": 21}, "random_ltd_layer_num is 22, and total_layer_num 21"),
        ({"random_ltd_schedule": None}, "schedule_type is None; fixed_linear"),
        (config(most=64), "min_value is 128 and max_value 64"),
        (config(steps=True), r"random_ltd_schedule.schedule_config.require_steps is True"),
    ],
)
def test_what_does_not_fit_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        RandomLTDScheduler({**CONFIG, **changes})


def test_a_learning_rate_by_layer_tokens_is_refused():
    with pytest.raises(UnimplementedOption, match="layer_token_lr_schedule"):
        RandomLTDScheduler({**CONFIG, "layer_token_lr_schedule": {"enabled": True}})
