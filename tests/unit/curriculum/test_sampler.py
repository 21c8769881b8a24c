"""DeepSpeed's sampler class: its arguments and attributes, as a batch sampler of torch's loader, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.sampler import DeepSpeedDataSampler
from tests.helpers.index_files import metric, write_metric

SAMPLES = 20


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    paths = write_metric(folder, "m", list(range(SAMPLES)))
    learning = {"enabled": True, "curriculum_metrics": {"m": metric(paths, [3, 9, 19], [2, 4]) | changes}}
    return {"enabled": True, "seed": 7, "data_sampling": {"num_epochs": 2, "curriculum_learning": learning}}


def sampler_of(config: dict[str, Any], rank: int = 0, size: int = 1, steps: int = 2, micro: int = 2) -> Any:
    return DeepSpeedDataSampler(config, SAMPLES, micro, rank, size, None, steps, rank)


def test_ranks_have_their_parts_of_the_same_batches(tmp_path: Path) -> None:
    config = settings_of(tmp_path)
    whole = [sample for part in sampler_of(config, steps=2, micro=4) for sample in part]
    assert len(whole) == 2 * SAMPLES
    assert set(whole[:16]) <= set(range(4))
    assert set(whole[16:32]) <= set(range(10))
    ranks = [list(sampler_of(config, rank, 2, steps=2, micro=2)) for rank in range(2)]
    assert [sample for parts in zip(*ranks, strict=True) for part in parts for sample in part] == whole
    assert len(sampler_of(config)) == 2 * SAMPLES


def test_it_is_a_batch_sampler_and_goes_on_from_its_state(tmp_path: Path) -> None:
    config = settings_of(tmp_path)
    sampler = sampler_of(config)
    found, states = [], []
    for batch in DataLoader(range(SAMPLES), batch_sampler=sampler, collate_fn=list):  # type: ignore[arg-type]
        found.append(batch)
        states.append(json.dumps(sampler.state_dict()))
    assert len(found) == 20
    for done in (1, 2, 7):
        resumed = sampler_of(config)
        resumed.load_state_dict(json.loads(states[done - 1]))
        assert resumed.consumed_samples == 2 * done
        assert resumed.current_difficulties == json.loads(states[done - 1])["current_difficulties"]
        assert list(resumed) == found[done:]


def test_attributes_are_those_of_the_batch_that_was_handed_out(tmp_path: Path) -> None:
    sampler = sampler_of(settings_of(tmp_path))
    assert (sampler.current_difficulties, sampler.curriculum_step, sampler.consumed_samples) == ({}, 0, 0)
    seen = []
    for _ in sampler:
        seen.append((sampler.curriculum_step, sampler.current_difficulties["m"], sampler.consumed_samples))
    batches = [(1, 3), (2, 3), (3, 9), (4, 9), (5, 19)]
    assert seen[:10] == [(*batches[each // 2], 2 * each + 2) for each in range(10)]
    assert sampler.curriculum_schedulers["m"].max_difficulty == 19
    assert sampler.state_dict()["current_difficulties"] == {"m": 19}
    assert [sampler_of(settings_of(tmp_path), rank, 3).get_start_end_idx(8) for rank in range(3)] == [
        (0, 3),
        (3, 5),
        (5, 8),
    ]


def test_functions_give_difficulties(tmp_path: Path) -> None:
    sampler = sampler_of(settings_of(tmp_path, schedule_type="custom", schedule_config={}, min_difficulty=0))
    with pytest.raises(UsageError, match="metrics: m"):
        sampler.set_custom_curriculum_learning_schedule({"other": lambda step: 0})
    sampler.set_custom_curriculum_learning_schedule({"m": lambda step: 2 * step})
    batches = iter(sampler)
    assert all(sample <= 2 for _ in range(2) for sample in next(batches))
    assert sampler.current_difficulties == {"m": 2}


def test_without_a_curriculum_all_samples_come_once_in_each_pass(tmp_path: Path) -> None:
    config = {"data_sampling": {"num_epochs": 3}}
    found = [sample for part in sampler_of(config) for sample in part]
    assert [sorted(found[start : start + SAMPLES]) for start in (0, 20, 40)] == [list(range(SAMPLES))] * 3


@pytest.mark.parametrize("wrong", [{"rank": 2, "size": 2}, {"micro": 0}, {"steps": 0}])
def test_sizes_that_describe_no_batches_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="describe no batches"):
        sampler_of({}, **wrong)
