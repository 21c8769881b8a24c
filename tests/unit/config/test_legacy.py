"""Old spellings, "auto", bare switches, texts that are numbers."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load
from mpispeed.config.legacy import ALIASES, IGNORED, NORMAL_FORMS, has, translate
from mpispeed.config.root import TEXT_KEYS, Config
from mpispeed.config.section import knows, walk


def test_the_tables_name_fields_that_exist():
    paths = {field.path for field in walk(Config)}
    assert {alias.new for alias in ALIASES} <= paths
    assert set(NORMAL_FORMS) <= paths
    assert not ({alias.old for alias in ALIASES} | set(IGNORED)) & paths


@pytest.mark.parametrize("alias", [a for a in ALIASES if a.convert is None], ids=lambda a: a.old)
def test_each_alias_moves_its_value(alias):
    outer, _, key = alias.old.rpartition(".")
    raw = {outer: {key: 7}} if outer else {key: 7}
    done = translate(raw, TEXT_KEYS, partial(knows, Config))
    assert has(done.data, alias.new)
    assert not has(done.data, alias.old)
    assert done.origin(alias.new) == f"alias of {alias.old}"
    assert done.as_spelled(alias.new) == alias.old
    assert bool(done.warnings) == alias.is_deprecated


def test_the_callers_dict_is_untouched():
    raw = {"zero_optimization": {"cpu_offload": False, "stage3_max_live_parameters": "1e9"}, "fp16": {}, "_c": [1]}
    before = copy.deepcopy(raw)
    load(raw)
    assert raw == before


def test_comments_are_dropped_at_every_level():
    raw = {
        "comment": "x",
        "_a": 1,
        "fp16": {"_b": 2, "comment": [1]},
        "optimizer": {"type": "SGD", "params": {"_c": 1}},
    }
    assert load(raw).config == load({"fp16": {}, "optimizer": {"type": "SGD", "params": {}}}).config


def test_auto_is_absent_and_remembered():
    loaded = load(
        {
            "train_batch_size": "auto",
            "fp16": {"enabled": "auto"},
            "zero_optimization": {"stage": 1, "stage3_prefetch_bucket_size": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": ["auto", "auto"]}},
        }
    )
    assert loaded.config.train_batch_size is None
    assert loaded.config.optimizer.params == {}
    assert loaded.config.zero_optimization.prefetch_bucket_size == 50_000_000
    for path in (
        "train_batch_size",
        "fp16.enabled",
        "zero_optimization.prefetch_bucket_size",
        "optimizer.params.lr",
        "optimizer.params.betas",
    ):
        assert loaded.origins[path] == 'default ("auto")'
    assert loaded.origins["zero_optimization.stage"] == "given"
    assert loaded.origins["fp16.loss_scale"] == "default"


def test_bare_switches():
    assert load({"fp16": True}).config.fp16.enabled
    assert load({"bfloat16": True}).config.bf16.enabled
    assert load({"fp16": True}).origins["fp16.enabled"] == "given as fp16: true"
    old = load({"zero_optimization": True, "allgather_size": 1000})
    assert (old.config.zero_optimization.stage, old.config.zero_optimization.allgather_bucket_size) == (1, 1000)
    assert [warning.split()[0] for warning in old.warnings] == ["zero_optimization:", "allgather_size"]
    assert load({"zero_optimization": False}).config.zero_optimization.stage == 0


def test_bf16_wins_over_its_old_name():
    loaded = load({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}})
    assert not loaded.config.bf16.enabled
    assert loaded.warnings == ["bfloat16 is ignored because bf16 is there"]


def test_old_switches_that_are_null_are_off():
    zero = load(
        {"zero_optimization": {"stage": 3, "cpu_offload": None, "cpu_offload_param": None}}
    ).config.zero_optimization
    assert (zero.offload_optimizer, zero.offload_param) == (None, None)
    assert (zero.cpu_offload, zero.cpu_offload_param, zero.cpu_offload_use_pin_memory) == (None, None, None)
    assert zero.stage3_gather_fp16_weights_on_model_save is False


def test_cpu_offload_becomes_a_section():
    loaded = load({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert loaded.config.zero_optimization.offload_optimizer.device == "cpu"
    assert (
        loaded.origins["zero_optimization.offload_optimizer.device"] == "given as zero_optimization.cpu_offload: true"
    )
    assert load({"zero_optimization": {"cpu_offload": False}}).config.zero_optimization.offload_optimizer is None


def test_old_and_new_together_are_refused():
    for old, new in (
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"stage3_max_live_parameters": 1}, {"max_live_parameters": 1}),
    ):
        with pytest.raises(ConfigError, match=f"zero_optimization.{next(iter(old))}: .* is given too"):
            load({"zero_optimization": {"stage": 2} | old | new})


def test_offload_false_and_null_and_empty():
    zero = load({"zero_optimization": {"offload_param": False, "offload_optimizer": None}}).config.zero_optimization
    assert zero.offload_param is None and zero.offload_optimizer is None
    assert load({"zero_optimization": {"offload_param": {}}}).config.zero_optimization.offload_param.device == "none"


@pytest.mark.parametrize("value", [5e8, "5e8", "500000000", 500_000_000, "5E+8", 500000000.0])
def test_numbers_however_spelled(value):
    loaded = load({"zero_optimization": {"reduce_bucket_size": value}})
    assert loaded.config.zero_optimization.reduce_bucket_size == 500_000_000


def test_numbers_in_params():
    loaded = load({"optimizer": {"type": "Adam", "params": {"lr": "1e-3", "betas": ["0.8", 0.9], "weight_decay": "0"}}})
    assert loaded.config.optimizer.params == {"lr": 1e-3, "betas": [0.8, 0.9], "weight_decay": 0}


def test_texts_that_look_like_numbers_stay_texts():
    loaded = load({"tensorboard": {"job_name": "007", "output_path": "1e3"}})
    assert (loaded.config.tensorboard.job_name, loaded.config.tensorboard.output_path) == ("007", "1e3")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1e999", 10**400])
def test_numbers_that_are_not_finite(value):
    with pytest.raises(ConfigError, match=r"optimizer.params.lr: expected a finite number"):
        load({"optimizer": {"type": "SGD", "params": {"lr": value}}})


@pytest.mark.parametrize("value", [None, 0, float("inf"), "auto"])
def test_progress_lines_off(value):
    assert load({"steps_per_print": value}).config.steps_per_print is None


def test_spelling_of_choices():
    loaded = load(
        {
            "communication_data_type": "FP32",
            "data_types": {"grad_accum_dtype": "torch.float32"},
            "checkpoint": {"tag_validation": "FAIL"},
            "autotuning": {"metric": "FLOPS"},
            "tensorboard": {"output_path": None},
            "scheduler": {"type": "WarmupLR", "params": None},
        }
    )
    assert loaded.config.communication_data_type == "fp32"
    assert loaded.config.data_types.grad_accum_dtype == "fp32"
    assert loaded.config.checkpoint.tag_validation == "Fail"
    assert loaded.config.autotuning.metric == "flops"
    assert loaded.config.scheduler.params == {}


def test_ignored_keys_warn():
    loaded = load({"zero_optimization": {"grad_hooks": True, "cpu_offload_use_pin_memory": True}})
    assert len(loaded.warnings) == 2 and "grad_hooks" in loaded.warnings[0]


def test_keys_that_are_no_texts():
    with pytest.raises(ConfigError, match=r"fp16\.3: a key must be a text"):
        load({"fp16": {3: 4}})


def test_values_that_are_no_plain_data_are_passed_on():
    def rate(step):
        return 1 / (1 + step)

    settings = {"scheduler": {"type": "LambdaLR", "params": {"lr_lambda": rate}}}
    assert load(settings).config.scheduler.params["lr_lambda"] is rate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_optimization.cpu_offload", True), ("zero_optimization.grad_hooks", True), ("aio.thread_count", 2),
        ("optimizer.params", None), ("tensor_parallel.tp", {}), ("checkpoint.tag_validation", "warn"),
        ("aio.intra_op_parallelism", 2),
    ],
)  # fmt: skip
def test_a_key_with_a_dot_is_unknown(key, value):
    for section in ({}, {key.partition(".")[0]: {}}):
        with pytest.raises(ConfigError, match=re.escape(key)) as caught:
            load({"train_micro_batch_size_per_gpu": 1, **section, key: value})
        assert "unknown" in str(caught.value)


def test_a_dotted_key_is_put_into_its_section():
    """trl writes them beside the sections; a fraction of elements is cut off."""
    raw = {
        "zero_optimization.reduce_bucket_size": 1024,
        "zero_optimization.stage3_prefetch_bucket_size": 921.6,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 77},
    }
    config = load({"train_batch_size": 1, **raw}).config
    assert config.zero_optimization.prefetch_bucket_size == 921
    assert config.zero_optimization.reduce_bucket_size == 77
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bukket_size: unknown key"):
        load({"train_batch_size": 1, "zero_optimization.reduce_bukket_size": 5})
