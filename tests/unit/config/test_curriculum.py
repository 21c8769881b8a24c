"""Settings of curriculum learning that cannot hold, each named by its key, and those that only warn."""

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load

GROWTH = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}  # fmt: skip
METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


def levels(difficulty, max_step):
    return {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": difficulty, "max_step": max_step}}


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("max_difficulty", {"max_difficulty": None}, "required when enabled"),
        ("curriculum_type", {"curriculum_type": None}, "required when enabled"),
        ("min_difficulty", {"min_difficulty": 0}, "0 is no length"),
        ("min_difficulty", {"min_difficulty": 65}, "65 is more than max_difficulty 64"),
        ("schedule_config.difficulty_step", {"schedule_config": {"total_curriculum_step": 1}}, "required by"),
        ("schedule_config.root_degree", {"schedule_type": "fixed_root"}, "required by"),
        ("schedule_config.max_step", levels([8, 64], [5, 6]), "2 entries for 2 difficulties"),
        ("schedule_config.max_step", levels([8, 16, 64], [5, 3]), "not in their order"),
        ("schedule_config.difficulty", levels([8, 65], [5]), "65 is outside of min_difficulty 8 and max_difficulty 64"),
    ],
)
def test_conflicts_name_the_key(key, change, message):
    with pytest.raises(ConfigError, match=rf"curriculum_learning\.{key}: .*{message}"):
        load({"curriculum_learning": GROWTH | change})
    assert load({"curriculum_learning": GROWTH | change | {"enabled": False}})


def test_metrics_have_the_same_rules():
    metric = {key: GROWTH[key] for key in GROWTH if key.startswith(("max", "schedule"))} | {"min_difficulty": 65}
    settings = {"data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"length": metric}}}}
    with pytest.raises(ConfigError, match=rf"{METRICS}\.length\.min_difficulty: 65 is more than"):
        load({"data_efficiency": settings})


def test_lengths_that_are_slow_warn():
    slow = GROWTH | {"schedule_config": {"total_curriculum_step": 10, "difficulty_step": 12}}
    told = load({"curriculum_learning": slow}).warnings
    assert told == [
        "curriculum_learning.schedule_config.difficulty_step 12 is no multiple of 8; matrix products of these lengths "
        "may be slower on GPUs"
    ]
    for other in (GROWTH, slow | {"curriculum_type": "rarity"}, slow | {"enabled": False}):
        assert load({"curriculum_learning": other}).warnings == []
