"""Settings of `data_efficiency.data_sampling` that cannot hold, each named by its key, and switches without effect."""

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load

LEARNING = "data_efficiency.data_sampling.curriculum_learning"
METRIC = {
    "index_to_sample_path": "a", "index_to_metric_path": "b", "difficulty_type": "value",
    "clustering_type": "schedule_based", "min_difficulty": 1, "max_difficulty": 9, "schedule_type": "custom",
}  # fmt: skip


def settings_of(*metrics, outer=True, sampling=True, **learning):
    learning = {"enabled": True, "curriculum_metrics": {f"m{n}": each for n, each in enumerate(metrics)}, **learning}
    return {
        "data_efficiency": {"enabled": outer, "data_sampling": {"enabled": sampling, "curriculum_learning": learning}}
    }


@pytest.mark.parametrize("key", [key for key in METRIC if key != "clustering_type"])
def test_keys_of_a_metric_that_are_required(key):
    with pytest.raises(ConfigError, match=rf"{LEARNING}\.curriculum_metrics\.m0\.{key}: required when"):
        load(settings_of(METRIC | {key: None}))
    assert load(settings_of(METRIC | {key: None}, enabled=False)).warnings == []


def test_what_a_metric_does_not_need():
    assert load(settings_of(METRIC | {"clustering_type": None})).warnings == []
    assert load(settings_of(METRIC | {"difficulty_type": "percentile", "index_to_metric_path": None}))
    single = {key: METRIC[key] for key in ("min_difficulty", "max_difficulty", "schedule_type")}
    assert load(settings_of(single | {"clustering_type": "single_cluster"}))


def test_several_metrics_that_choose_need_a_folder():
    with pytest.raises(ConfigError, match=rf"{LEARNING}\.data_cluster_path: required for .*m0, m1"):
        load(settings_of(METRIC, METRIC))
    assert load(settings_of(METRIC, METRIC, data_cluster_path="folder"))
    assert load(settings_of(METRIC, METRIC | {"clustering_type": "single_cluster"}))


def test_switches_that_an_outer_one_undoes_warn():
    for switches, warned in (
        ({}, []),
        ({"outer": False}, ["data_efficiency.data_sampling.enabled"]),
        ({"sampling": False}, [f"{LEARNING}.enabled"]),
    ):
        assert [warning.split()[0] for warning in load(settings_of(METRIC, **switches)).warnings] == warned
