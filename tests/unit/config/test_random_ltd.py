"""Settings of random-LTD: what is required, what contradicts, and levels that are off."""

from __future__ import annotations

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load


def dropping(**more):
    """Settings of random-LTD; `more` are changes of its section, `others` other sections."""
    growth = {"schedule_type": "fixed_linear", "schedule_config": {"require_steps": 9, "seq_per_step": 8}}
    section = {
        "enabled": True, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2],
        "model_type": "decoder", "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {"min_value": 8, "max_value": 64, **growth},
    }  # fmt: skip
    others = more.pop("others", {})
    routing = {"enabled": True, "random_ltd": section | more}
    return {"data_efficiency": {"enabled": True, "data_routing": routing}} | others


DROPPING = {
    "total_layer_num": {"total_layer_num": None},
    "model_type": {"model_type": None},
    "hidden_state_order": {"hidden_state_order": None},
    "random_ltd_layer_id": {"random_ltd_layer_id": [1, 1]},
    "random_ltd_layer_num": {"total_layer_num": 1},
    "model_mask_name": {"model_type": "encoder"},
    "random_ltd_schedule.max_value": {"random_ltd_schedule": {"min_value": 8}},
    "random_ltd_schedule.schedule_config.require_steps": {"random_ltd_schedule": {"schedule_config": {}}},
    "random_ltd_schedule.min_value": {"random_ltd_schedule": {"min_value": 65, "max_value": 64}},
    "layer_token_lr_schedule.enabled": {"layer_token_lr_schedule": {"enabled": True}},
    "enabled": {"others": {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}},
}


@pytest.mark.parametrize("key", DROPPING)
def test_conflicts_name_the_key(key):
    with pytest.raises(ConfigError, match=rf"(^configuration: |\n  )data_efficiency.data_routing.random_ltd.{key}: "):
        load(dropping(**DROPPING[key]))


def test_token_drop_that_is_off_at_an_outer_level_warns():
    assert load(dropping()).warnings == []
    assert load(dropping()).config.data_efficiency.routes_tokens
    given = dropping()
    given["data_efficiency"]["data_routing"]["enabled"] = False
    (said,) = load(given).warnings
    assert "random_ltd has no effect here: data_efficiency.enabled and data_efficiency.data_routing.enabled" in said
    assert not load(given).config.data_efficiency.routes_tokens
