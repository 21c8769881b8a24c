"""Layers that compute with compressed weights and stay what they are."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.compression import compression_scheduler, init_compression
from mpispeed.nn.compression import compression_of, fake_quantize, state_of


def section(technique, shared=None, **groups):
    """Settings of one technique; groups by name: (params, modules) or (params, modules, related)."""
    made = {}
    for name, (params, modules, *related) in groups.items():
        made[name] = {"params": params, "modules": modules, **({"related_modules": related[0]} if related else {})}
    shared = {"enabled": True, "schedule_offset": 0, **(shared or {})}
    return {"compression_training": {technique: {"shared_parameters": shared, "different_groups": made}}}


def weights(bits=4, modules=("*",), **shared):
    shared = {"quantize_weight_in_forward": True, **shared}
    return section("weight_quantization", shared, wq=({"start_bits": 8, "target_bits": bits}, list(modules)))


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def test_a_layer_computes_with_quantized_weights_and_stays_itself():
    model, plain = network(), network()
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    assert init_compression(model, weights()) is model
    assert {name: id(param) for name, param in model.named_parameters()} == {n: b[0] for n, b in before.items()}
    assert isinstance(model[0], nn.Linear)
    assert str(model) == str(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(5, 8)
    layer = model[0]
    out = layer(x)
    how = state_of(layer).quantizer
    expected = F.linear(x, fake_quantize(layer.weight, 4, how), layer.bias)
    assert torch.equal(out, expected)
    assert not torch.equal(out, plain[0](x))
    assert layer.weight is layer._parameters["weight"]
    out.sum().backward()
    plain[0](x).sum().backward()
    assert torch.equal(layer.weight.grad, plain[0].weight.grad)  # as if the weight were not rounded
    layer.weight = nn.Parameter(torch.ones(16, 8))
    assert torch.equal(layer.weight, torch.ones(16, 8))


def test_techniques_begin_at_their_offsets():
    model, plain = network(), network()
    init_compression(model, weights(schedule_offset=2))
    scheduler = compression_scheduler(model)
    x = torch.randn(5, 8)
    seen = []
    for _ in range(4):
        seen.append(torch.equal(model(x), plain(x)))
        scheduler.step()
    assert seen == [True, True, False, False]
    assert scheduler.training_steps == 4


def test_copies_and_pickles_are_compressed_on_their_own():
    model = network()
    init_compression(model, weights(schedule_offset=1))
    x = torch.randn(5, 8)
    plain = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        compression_of(other).set_step(1)
        assert not torch.equal(other(x), plain)
        assert torch.equal(model(x), plain)
        assert type(other[0]) is type(model[0])


def test_a_second_call_changes_nothing_and_other_settings_are_refused():
    model = network()
    init_compression(model, weights())
    found = compression_of(model)
    init_compression(model, weights())
    assert compression_of(model) is found
    with pytest.raises(ConfigError, match="compressed already, by other settings"):
        init_compression(model, weights(bits=5))


def test_a_period_of_0_steps_is_one_of_1():
    """Where bits do not fall, scripts of DeepSpeedExamples have it."""
    model = network()
    given = weights(bits=8)
    params = given["compression_training"]["weight_quantization"]["different_groups"]["wq"]["params"]
    params["quantization_period"] = 0
    init_compression(model, given)
    assert {group.technique.period for group in compression_of(model).groups} == {1}
