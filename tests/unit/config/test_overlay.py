"""Values that trials lay over the settings of a script."""

import pytest

from mpispeed.config import load, load_for_run
from mpispeed.config.overlay import laid_over, merged

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sizes(**given):
    return dict(zip(BATCH, (given.get(name) for name in ("all", "micro", "steps")), strict=True))


def given(**values):
    return {name: value for name, value in sizes(**values).items() if value is not None}


def test_without_values_settings_are_what_they_were():
    raw = {"zero_optimization": {"stage": 1}}
    assert merged(raw) is raw
    with laid_over({"zero_optimization": {"stage": 2}}):
        assert merged(raw) == {"zero_optimization": {"stage": 2}}
        with laid_over({}):
            assert merged(raw) is raw
    assert merged(raw) is raw
    assert raw == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("own", "trial", "found"),
    [
        (given(all=32, micro=4, steps=8), given(micro=2), given(micro=2, steps=8)),
        (given(all=32, micro=4), given(steps=2), given(micro=4, steps=2)),
        (given(all=32, micro=4, steps=8), given(all=64), given(all=64, micro=4)),
        (given(all=32), given(all=64), given(all=64)),
        (given(all=32, steps=8), given(micro=2, all=16), given(micro=2, all=16)),
        (given(all=32, micro=4, steps=8), given(all=8, micro=2, steps=4), given(all=8, micro=2, steps=4)),
        (given(all=32, micro=4), {"bf16": {"enabled": True}}, {**given(all=32, micro=4), "bf16": {"enabled": True}}),
        (given(micro=4), {"train_micro_batch_size_per_gpu": "auto"}, given(micro=4)),
    ],
)
def test_two_of_the_three_batch_sizes_are_left(own, trial, found):
    with laid_over(trial):
        assert merged(own) == found


def test_sections_are_merged_and_other_kinds_replaced():
    own = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-6}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}},
        "gradient_clipping": 1.0,
    }
    trial = {
        "optimizer": {"type": "adam", "params": {"lr": "auto", "weight_decay": 0.1}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}},
        "zero_optimization": {"offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        "gradient_clipping": None,
    }
    with laid_over(trial):
        found = merged(own)
    assert found == {
        "optimizer": {"type": "adam", "params": {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}},
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/x"}, "reduce_bucket_size": "auto",
        },
        "gradient_clipping": None,
    }  # fmt: skip


def test_all_ways_of_reading_settings_see_the_values(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 4}')
    for source in (path, {"train_micro_batch_size_per_gpu": 4}):
        with laid_over({"zero_optimization": {"stage": 2}}):
            assert [read(source).config.zero_optimization.stage for read in (load, load_for_run)] == [2, 2]
        assert load(source).config.zero_optimization.stage == 0
