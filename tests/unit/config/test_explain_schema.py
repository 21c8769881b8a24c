"""Where values came from, and the file format for machines and people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import Config, explain, load, schema
from mpispeed.config.derive import measures_wall_clock, overlaps_communication
from mpispeed.config.dtypes import accumulation_dtype, communication_dtype
from mpispeed.config.legacy import ALIASES
from mpispeed.config.schema import reference_page
from mpispeed.config.section import walk
from mpispeed.precision.policy import parse_dtype, resolve

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "config.md"


def rows_of(settings, ranks):
    return {row.path: row for row in explain(load(settings), ranks)}


def test_every_value_has_one_row_and_an_origin():
    rows = explain(load({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}}}), 1)
    paths = [row.path for row in rows]
    assert len(paths) == len(set(paths)) > 300
    assert all(row.origin for row in rows)
    by_path = {row.path: row for row in rows}
    assert by_path["optimizer.params.lr"][1:] == (None, 'default ("auto")')
    assert by_path["optimizer.params.eps"][1:] == (1e-8, "given")
    assert by_path["zero_optimization.stage"][1:] == (0, "default")


def test_batch_sizes_are_derived():
    rows = rows_of({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4)
    assert rows["gradient_accumulation_steps"][1:] == (
        4, "derived: train_batch_size / train_micro_batch_size_per_gpu / 4 ranks",
    )  # fmt: skip
    assert rows["train_batch_size"].origin == "given"
    rows = rows_of({"train_micro_batch_size_per_gpu": 4}, 1)
    assert rows["train_batch_size"].value == 4 and rows["train_batch_size"].origin.endswith("* 1 rank")
    assert rows["gradient_accumulation_steps"][1:] == (1, "default")


def test_open_batch_sizes_say_what_is_missing():
    assert rows_of({"train_batch_size": "auto"}, 2)["train_batch_size"].origin.startswith("missing: give")


def test_batch_sizes_that_do_not_fit():
    with pytest.raises(ConfigError, match="train_batch_size 6"):
        explain(load({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3}), 4)


@pytest.mark.parametrize(
    ("settings", "communication", "accumulation"),
    [
        ({}, "fp32", "fp32"),
        ({"fp16": True}, "fp16", "fp32"),
        ({"bf16": True}, "bf16", "fp32"),
        ({"bf16": True, "zero_optimization": {"stage": 1}}, "bf16", "fp32"),
        ({"fp16": True, "zero_optimization": {"stage": 2}}, "fp16", "fp32"),
        ({"bf16": True, "data_types": {"grad_accum_dtype": "bf16"}, "zero_optimization": {"stage": 1}}, "bf16", "bf16"),
        ({"bf16": True, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}, "fp32", "fp32"),
    ],
)
def test_number_formats_follow_the_model(settings, communication, accumulation):
    config = load(settings).config
    assert (communication_dtype(config), accumulation_dtype(config)) == (communication, accumulation)
    # The engine's own rule; explain has to say what a run does.
    policy = resolve(
        fp16_enabled=config.fp16.enabled,
        bf16_enabled=config.bf16.enabled,
        grad_accum_dtype=config.data_types.grad_accum_dtype,
        communication_data_type=config.communication_data_type,
    )
    assert policy.accumulate == parse_dtype(accumulation, "grad_accum_dtype")
    assert policy.communicate == parse_dtype(communication, "communication_data_type")


def test_switches_that_follow_others():
    assert [overlaps_communication(load({"zero_optimization": {"stage": n}}).config) for n in range(4)] == [
        False, False, False, True,
    ]  # fmt: skip
    assert overlaps_communication(load({"zero_optimization": {"overlap_comm": True}}).config)
    assert measures_wall_clock(load({"flops_profiler": True}).config)
    assert rows_of({"train_batch_size": 1, "flops_profiler": True}, 1)["wall_clock_breakdown"].value is True


def test_the_schema_is_json_and_closed():
    document = json.loads(json.dumps(schema()))
    assert document["additionalProperties"] is False
    assert set(document["properties"]) == set(Config.model_fields)
    assert document["$defs"]["ZeroOptimization"]["properties"]["stage"]["maximum"] == 3


def test_every_key_is_described():
    assert [field.path for field in walk(Config) if not field.description] == []


def test_the_reference_page_is_up_to_date():
    page = reference_page()
    assert all(f"`{alias.old}`" in page for alias in ALIASES)
    assert PAGE.read_text(encoding="utf-8") == page, "run: mpispeed config schema --markdown > docs/reference/config.md"
