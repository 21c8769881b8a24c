"""Schedules from the command line."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from torch import nn

from mpispeed.optim import (
    VALID_LR_SCHEDULES,
    OneCycle,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)
from mpispeed.optim.schedule import build_schedule

DEFAULTS = {
    "lr_schedule": None,
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}


def config(*arguments: str) -> dict[str, Any]:
    section, error = get_config_from_args(parse_arguments(arguments)[0])
    assert error is None
    assert section is not None
    return section


def test_defaults_and_group() -> None:
    parser = argparse.ArgumentParser()
    assert add_tuning_arguments(parser) is parser
    assert vars(parser.parse_args([])) == DEFAULTS
    assert "Convergence Tuning" in parser.format_help()


def test_known_and_unknown_arguments_are_told_apart() -> None:
    known, unknown = parse_arguments(["--warmup_num_steps", "5", "--mine", "3"])
    assert known.warmup_num_steps == 5
    assert unknown == ["--mine", "3"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], False), (["--lr_range_test_staircase"], True)]
    + [
        (["--lr_range_test_staircase", word], value) for word, value in [("True", True), ("0", False), ("false", False)]
    ],
)
def test_staircase_reads_truth(arguments: list[str], expected: bool) -> None:
    assert parse_arguments(arguments)[0].lr_range_test_staircase is expected


def test_staircase_refuses_other_words() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--lr_range_test_staircase", "maybe"])


def test_params_of_every_family() -> None:
    assert config("--lr_schedule", "LRRangeTest") == {
        "type": "LRRangeTest",
        "params": {key: value for key, value in DEFAULTS.items() if key.startswith("lr_range_test")},
    }
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
    for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        assert config("--lr_schedule", name) == {"type": name, "params": warmup}
    cycle = config("--lr_schedule", "OneCycle", "--cycle_first_step_size", "4", "--cycle_momentum")["params"]
    assert "cycle_second_step_size" not in cycle
    assert "cycle_momentum" not in cycle
    assert cycle["cycle_first_step_size"] == 4
    assert config("--lr_schedule", "OneCycle", "--cycle_second_step_size", "6")["params"]["cycle_second_step_size"] == 6


def test_config_builds_a_schedule() -> None:
    section = config("--lr_schedule", "OneCycle", "--cycle_first_step_size", "4")
    schedule = build_schedule(section["type"], section["params"], torch.optim.Adam([nn.Parameter(torch.zeros(1))]))
    assert isinstance(schedule, OneCycle)
    assert (schedule.first_size, schedule.second_size) == (4, 4)


def test_arguments_that_were_taken_away_are_left_out() -> None:
    args = argparse.Namespace(lr_schedule="WarmupLR", warmup_min_lr=None, warmup_num_steps=3)
    assert get_config_from_args(args) == ({"type": "WarmupLR", "params": {"warmup_num_steps": 3}}, None)


@pytest.mark.parametrize(
    "args", [argparse.Namespace(), argparse.Namespace(lr_schedule=None), argparse.Namespace(lr_schedule="StepLR")]
)
def test_no_config_without_a_known_schedule(args: argparse.Namespace) -> None:
    section, error = get_config_from_args(args)
    assert section is None
    assert "lr_schedule" in (error or "")


def test_override_copies_all_families() -> None:
    params = {"warmup_num_steps": 1, "other": 2}
    override_params(parse_arguments([])[0], params)
    left_out = {
        "lr_schedule",
        "cycle_momentum",
        "warmup_min_ratio",
        "cos_min_ratio",
        "cycle_second_step_size",
        "cycle_second_stair_count",
    }
    assert set(params) == set(DEFAULTS) - left_out | {"other"}
    assert params["warmup_num_steps"] == 1000


@pytest.mark.parametrize(
    ("name", "lr"), [("LRRangeTest", 0.001), ("OneCycle", 0.1), ("WarmupLR", 0.001), ("WarmupDecayLR", 0.001)]
)
def test_lr_from_config(name: str, lr: float) -> None:
    assert get_lr_from_config(config("--lr_schedule", name)) == (lr, "")


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"params": {}}, "type"),
        ({"type": "WarmupLR"}, "params"),
        ({"type": "StepLR", "params": {}}, "StepLR"),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 5}}, "WarmupCosineLR"),
        ({"type": "WarmupLR", "params": None}, "warmup_max_lr"),
    ],
)
def test_no_lr_with_a_reason(section: dict[str, Any], word: str) -> None:
    lr, reason = get_lr_from_config(section)
    assert lr is None
    assert word in reason


def test_names() -> None:
    assert set(VALID_LR_SCHEDULES) == {"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}
