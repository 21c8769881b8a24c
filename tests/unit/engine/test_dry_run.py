"""Dry runs: what is left out changes nothing, models stay as they are, and ranks and layers cost little."""

import time

import pytest
import torch
from torch import nn

from mpispeed.config.load import validate
from mpispeed.engine.estimate import dry_run
from mpispeed.engine.estimate.budget import gather_inputs, predict
from mpispeed.plan.plan import make_plan
from tests.helpers.covering import pairwise
from tests.unit.engine.test_budget import Stack, on_meta
from tests.zoo.training import WARM, config


def facts_of(source, ranks, model, *, node=2):
    return gather_inputs(make_plan(validate(source).config, ranks, torch.float32, ranks_per_node=node), model)


@pytest.mark.parametrize(
    ("accumulation", "stage", "reuse", "live", "ahead", "second"),
    pairwise([2, 4, 7], [1, 2, 3], [0, 9000, 10**9], [10000, 40000, 10**9], [0, 8000], [1, 2]),
)
def test_steps_that_count_several_times_are_alike(accumulation, stage, reuse, live, ahead, second, monkeypatch):
    source = config(stage, 4 * accumulation, accumulation, dtype="bf16", **WARM)
    source["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_reuse_distance": reuse,
        "stage3_max_live_parameters": live,
        "stage3_prefetch_bucket_size": ahead,
        "overlap_comm": True,
        **({"zero_hpz_partition_size": second} if stage == 3 else {}),
    }
    facts = facts_of(source, 4, on_meta())
    found = dry_run.rehearse(facts)
    monkeypatch.setattr(dry_run, "MICRO_STEPS", accumulation)
    every = dry_run.rehearse(facts)
    assert +found.sent == +every.sent
    assert +found.messages == +every.messages
    assert +found.params.reads == +every.params.reads
    assert (found.gathered_bytes, found.scratch_bytes) == (every.gathered_bytes, every.scratch_bytes)


def test_a_model_is_left_alone():
    model = Stack()
    before = {name: (param.data_ptr(), param._version, param.clone()) for name, param in model.named_parameters()}
    predict(facts_of(config(3, 4, 1, dtype="fp32", **WARM), 4, model))
    for name, param in model.named_parameters():
        address, version, values = before[name]
        assert (param.data_ptr(), param._version, type(param)) == (address, version, nn.Parameter)
        assert torch.equal(param, values)
        assert param.grad is None


@pytest.mark.parametrize(
    "zero",
    [
        {},
        {"zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        {"stage": 2, "allgather_partitions": False},  # a message of each of the 10240 ranks, for every unit
        {"stage": 1, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.5}},
    ],
)
def test_many_ranks_and_layers_take_seconds(zero):
    ranks, layers, width = 10_240, 200, 8192
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    source = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **zero},
    }
    start = time.process_time()
    budget = predict(facts_of(source, ranks, model, node=8))
    assert time.process_time() - start < 30  # about 2; work for each rank would be hours
    assert budget.sent_bytes() > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_of_gradients_takes_the_same_message_for_any_number_of_ranks(stage):
    """A sum that the plan counts as 2 (n - 1) / n of its message, whatever carries it."""
    found = []
    for ranks in (2, 3, 64, 10_240):
        source = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **WARM}
        sent = predict(facts_of(source, ranks, on_meta(), node=8)).sent
        (row,) = (row for row in sent if row.what == "gradient norm")
        assert (row.verb, row.messages) == ("all_reduce", 1)
        found.append(row.bytes * ranks / (2 * (ranks - 1)))
    assert found == pytest.approx([72 * 8] * 4, abs=1)  # integers of 64 bits; the plan counts whole bytes
