"""DeepSpeed's layer: arguments, attributes, names, results."""

import inspect
import logging

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpispeed.base import log
from mpispeed.base.errors import ConfigError
from mpispeed.mesh import sim
from mpispeed.moe import MoE
from tests.helpers.experts import Block

PARAMETERS = [
    *("hidden_size", "expert", "num_experts", "ep_size", "k", "capacity_factor", "eval_capacity_factor"),
    *("min_capacity", "use_residual", "noisy_gate_policy", "drop_tokens", "use_rts", "use_tutel"),
    *("enable_expert_tensor_parallelism", "top2_2nd_expert_sampling"),
]
DEFAULTS = [1, 1, 1, 1.0, 1.0, 4, False, None, True, True, False, False, True]


def made(**options):
    torch.manual_seed(2)
    return MoE(6, Block(), **{"num_experts": 4, **options})


def test_arguments_are_deepspeeds():
    parameters = inspect.signature(MoE).parameters
    assert list(parameters) == PARAMETERS
    assert [each.default for each in parameters.values()][2:] == DEFAULTS


def test_names_and_marks_of_parameters():
    layer = made(use_residual=True)
    names = {name for name, _ in layer.named_parameters()}
    inner = ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert names == {
        "deepspeed_moe.gate.wg.weight",
        *(f"deepspeed_moe.experts.deepspeed_experts.{number}.{each}" for number in range(4) for each in inner),
        *(f"mlp.{each}" for each in inner),
        "coefficient.weight",
        "coefficient.bias",
    }
    for name, param in layer.named_parameters():
        is_expert = ".experts." in name
        assert getattr(param, "allreduce", True) is not is_expert
        assert getattr(param, "group_name", None) == ("ep_size_1" if is_expert else None)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    assert all(torch.equal(each.up.weight, layer.mlp.up.weight) for each in experts)
    assert len({each.up.weight.data_ptr() for each in experts}) == 4


def test_results():
    layer, x = made(drop_tokens=False), torch.randn(2, 5, 6)
    output, loss, counts = layer(x)
    assert output.shape == x.shape
    assert loss.shape == ()
    assert counts.sum() == 10
    expected, _ = layer.deepspeed_moe.experts.deepspeed_experts[0](x)
    gates = (x @ layer.deepspeed_moe.gate.wg.weight.t()).softmax(-1).max(-1).values
    assert_close(output, expected * gates[..., None])


def test_residual():
    layer, x = made(drop_tokens=False, use_residual=True), torch.randn(3, 6)
    output, _, _ = layer(x)
    moe, _, _ = made(drop_tokens=False)(x)
    mix = layer.coefficient(x).softmax(-1)
    assert_close(output, mix[:, :1] * moe + mix[:, 1:] * layer.mlp(x)[0])


def test_capacity_of_training_and_evaluation():
    layer = made(capacity_factor=0.25, eval_capacity_factor=100.0, min_capacity=1)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()
    x = torch.randn(16, 6)
    is_there = layer(x)[0].abs().sum(1) > 0
    assert is_there.sum() == 1
    assert (layer.eval()(x)[0].abs().sum(1) > 0).all()


def test_unused_tokens():
    x, used = torch.randn(4, 6), torch.tensor([1, 0, 1, 0])
    output, _, counts = made()(x, used)
    assert (output.abs().sum(1) > 0).tolist() == [True, False, True, False]
    assert counts.sum() == 2
    output, _, counts = made(k=2)(x, used)
    assert (output.abs().sum(1) > 0).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ep_size": 5}, r"ep_size = 5 ranks cannot share 4 experts out; choose a number from 1 to 4"),
        ({"noisy_gate_policy": "Normal"}, "noisy_gate_policy = 'Normal' is unknown"),
        ({"k": 5}, "k = 5"),
        ({"k": "2"}, "k of a router of experts = '2' is a str; give a whole number"),
        ({"num_experts": 0}, "num_experts = 0: a layer of experts needs at least one"),
        ({"num_experts": [4]}, r"num_experts = \[4\] is a list; give a whole number"),
        ({"ep_size": "2"}, "ep_size = '2' is a str"),
        ({"ep_size": 2.0}, "ep_size = 2.0 is a float"),
        ({"capacity_factor": "1"}, "capacity_factor = '1' of a router of experts: give a positive number"),
    ],
)
def test_arguments_that_cannot_hold(options, text):
    with pytest.raises(ConfigError, match=text):
        made(**options)


def test_tutel_is_the_same_path_and_said_so(caplog):
    log._seen.clear()
    with caplog.at_level(logging.INFO):
        layer, x = made(use_tutel=True), torch.randn(3, 6)
    assert "use_tutel has no effect" in caplog.text
    assert torch.equal(layer(x)[0], made()(x)[0])


def test_a_group_of_another_size_is_refused():
    layer = made(ep_size=2)
    assert (layer.num_experts, layer.num_local_experts, layer.expert_group_name) == (4, 2, "ep_size_2")

    def work(world):
        with pytest.raises(ConfigError, match="a group of 1 ranks for a layer with ep_size = 2"):
            layer.set_expert_group(world.comm)

    sim.run(1, work)


def test_deepspeeds_modules_have_these_names():
    from mpispeed.moe.experts import Experts
    from mpispeed.moe.layer import MoE as Same
    from mpispeed.moe.sharded_moe import MOELayer, TopKGate, top1gating

    layer = made()
    assert Same is MoE
    assert isinstance(layer.deepspeed_moe, MOELayer)
    assert isinstance(layer.deepspeed_moe.gate, TopKGate)
    assert isinstance(layer.deepspeed_moe.experts, Experts)
    assert callable(top1gating)
    assert isinstance(layer, nn.Module)
