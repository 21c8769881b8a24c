"""Forecasts of many settings at once: those of `mpispeed plan`, of models that stay as they are."""

import copy
import json

import pytest
import torch
from torch import nn

from mpispeed.cli.plan import forecast as plan_forecast
from mpispeed.config.load import validate
from mpispeed.engine.estimate.feasibility import Setup
from mpispeed.tuning.forecast import Survey, survey
from tests.helpers.covering import pairwise
from tests.zoo.models import Mlp
from tests.zoo.training import WARM, config

RANKS = 4


def ask(candidates, model, ranks=RANKS, **options):
    return Survey.of_values(json.loads(json.dumps(survey(candidates, model, ranks=ranks, **options))))


@pytest.mark.parametrize(
    ("stage", "accumulation", "bucket", "dtype"), pairwise([0, 1, 2, 3], [1, 3], [300, 10**8], ["fp32", "bf16"])
)
def test_a_forecast_is_what_plan_says(stage, accumulation, bucket, dtype):
    source = config(stage, 8 * accumulation, accumulation, dtype=dtype, zero={"reduce_bucket_size": bucket}, **WARM)
    found = ask([source], Mlp()).forecasts[0]
    plan, stages, _ = plan_forecast(Setup(validate(source).config, RANKS), Mlp(), [plan_limit()])
    budget = stages[0].budget
    assert found.refusal == ""
    assert found.memory_bytes == sum(row.bytes for row in budget.held)
    assert found.build_bytes == budget.build_bytes
    assert sum(found.sent.values()) == budget.sent_bytes()
    assert all(found.calls[verb] for verb, size in found.sent.items() if size)
    assert (found.train_batch, found.micro_batch, found.micro_steps) == plan.batch.triple


def plan_limit():
    from mpispeed.base.cgroups import Limit

    return Limit("of the test", 2**40)


def test_buckets_and_micro_steps_change_the_calls():
    sources = [
        config(1, 8 * steps, steps, zero={"reduce_bucket_size": bucket}, **WARM)
        for bucket, steps in ((10**8, 1), (100, 1), (100, 2))
    ]
    wide, narrow, twice = ask(sources, Mlp()).forecasts
    assert narrow.calls["reduce_scatter"] > wide.calls["reduce_scatter"]
    assert narrow.sent["reduce_scatter"] >= wide.sent["reduce_scatter"]
    assert twice.calls["reduce_scatter"] == narrow.calls["reduce_scatter"]  # stage 1 sums once in a step


def test_values_that_a_trainer_fills_in_are_predicted_as_defaults():
    zero = {"stage": 2, "reduce_bucket_size": "auto"}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    sources = [
        {
            **sizes,
            "train_batch_size": "auto",
            "optimizer": optimizer,
            "zero_optimization": zero,
            "bf16": {"enabled": "auto"},
        },
        {**sizes, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}},
    ]
    filled, plain = ask(sources, Mlp()).forecasts
    assert filled.refusal == ""
    assert filled == plain


def test_states_in_files_are_moved(tmp_path):
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    source = config(3, 8, 1, zero={"offload_optimizer": files}, **WARM)
    found = ask([source], Mlp()).forecasts[0]
    assert found.held["nvme"] > 0
    assert found.moved["nvme > host"] > 0


def test_what_cannot_be_is_a_sentence_beside_the_others():
    sources = [config(1, 8, 1, **WARM), config(1, 7, 1, **WARM), {"train_batch_size": 8, "zero_optimisation": {}}]
    fits, odd, unknown = ask(sources, Mlp()).forecasts
    assert fits.refusal == ""
    assert "train_batch_size" in odd.refusal
    assert "zero_optimisation" in unknown.refusal
    assert "\n" not in odd.refusal + unknown.refusal


def test_slices_are_predicted_on_a_copy():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4))
    before = copy.deepcopy(model.state_dict())
    sources = [config(1, 8, 1, tensor_parallel={"autotp_size": slices}, **WARM) for slices in (1, 2, 3)]
    whole, sliced, odd = ask(sources, model).forecasts
    assert whole.refusal == sliced.refusal == ""
    assert sliced.memory_bytes < whole.memory_bytes
    assert "autotp_size 3 does not divide the 4 ranks" in odd.refusal
    assert {name: value.shape for name, value in model.state_dict().items()} == {k: v.shape for k, v in before.items()}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Tied(nn.Module):
    """A model that ties two matrices, and keeps an object that cannot be copied."""

    def __init__(self, keeps):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.zeros(3))
        self.keeps = keeps


def test_ties_count_once_and_models_that_cannot_be_copied_are_predicted_too():
    with open("/dev/null") as file:  # noqa: PTH123
        plain, kept = (ask([config(3, 8, 1, **WARM)], Tied(thing)) for thing in (None, file))
    assert plain.forecasts == kept.forecasts
    assert plain.model == kept.model
    assert plain.model == {
        "num_params": 16 * 8 + 3 * (8 * 8 + 8), "trainable_num_params": 16 * 8 + 3 * 72, "hidden_size": 8,
        "num_layers": 3,
    }  # fmt: skip


def test_limits_of_the_machine_are_told():
    found = ask([], Mlp(), ranks_per_node=2)
    assert (found.ranks, found.ranks_per_node, found.device) == (RANKS, 2, "cpu")
    assert all(size > 0 for size in found.limits.values())
    assert found.limits
