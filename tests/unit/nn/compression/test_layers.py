"""Layers that compute with compressed weights and stay what they are."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from mpispeed.base.errors import ConfigError
from mpispeed.base.split_grads import split
from mpispeed.compression import compression_scheduler, init_compression
from mpispeed.nn.compression import Quantizer, compression_of, fake_quantize, state_of


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


def test_a_model_of_which_a_part_was_compressed_is_refused():
    """Its layers would be looked for by names that the part has."""
    model = network()
    init_compression(model, weights())
    with pytest.raises(ConfigError, match="only the part '0' of the model was compressed"):
        init_compression(nn.Sequential(model), weights())


# -- pruning -----------------------------------------------------------------------------------------------------------


def masked(technique, ratio, layer, name="0", **shared):
    """A model of one layer with this pruning."""
    model = nn.Sequential(layer)
    init_compression(model, section(technique, shared, p=({"dense_ratio": ratio}, [name])))
    return model


def test_fixed_masks_are_made_of_the_weights_when_pruning_begins():
    torch.manual_seed(1)
    layer = nn.Linear(6, 4)
    model = masked("sparse_pruning", 0.25, layer, schedule_offset=1)
    scheduler = compression_scheduler(model)
    x = torch.randn(3, 6)
    assert bool(layer.sparse_mask.all())
    plain = model(x)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(-12.0, 12).view(4, 6))
    scheduler.step()
    out = model(x)
    expected = torch.zeros(24, dtype=torch.bool)
    expected[[0, 1, 2, 3, 22, 23]] = True  # -12, -11, -10, -9, 10, 11: of the two with 9 the first
    assert torch.equal(layer.sparse_mask.flatten(), expected)
    assert torch.equal(out, F.linear(x, layer.weight * layer.sparse_mask, layer.bias))
    assert not torch.equal(out, plain)
    with torch.no_grad():
        layer.weight.neg_().add_(100)
    model(x)
    assert torch.equal(layer.sparse_mask.flatten(), expected)  # and stay


def test_a_fixed_mask_of_a_checkpoint_is_kept():
    layer, other = nn.Linear(6, 4), nn.Linear(6, 4)
    first, second = (masked("sparse_pruning", 0.5, each) for each in (layer, other))
    first(torch.ones(1, 6))
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        other.weight.copy_(torch.randn(4, 6))
    second(torch.ones(1, 6))
    assert torch.equal(other.sparse_mask, layer.sparse_mask)


def test_a_fixed_mask_of_another_ratio_is_made_anew():
    layer, other = nn.Linear(6, 4), nn.Linear(6, 4)
    first, second = masked("sparse_pruning", 0.5, layer), masked("sparse_pruning", 0.25, other)
    first(torch.ones(1, 6))
    second.load_state_dict(first.state_dict())
    second(torch.ones(1, 6))
    largest = layer.weight.abs().flatten().topk(6).indices
    assert set(other.sparse_mask.flatten().nonzero().flatten().tolist()) == set(largest.tolist())


def test_rows_go_with_their_biases():
    layer = nn.Linear(3, 4)
    model = masked("row_pruning", 0.5, layer, method="l1")
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 4.0, 3.0, 2.0]).view(4, 1).expand(4, 3))
    out = model(torch.randn(2, 3))
    assert layer.row_mask.flatten().tolist() == [False, True, True, False]
    assert bool((out[:, [0, 3]] == 0).all())
    assert bool((out[:, [1, 2]] != 0).all())


def test_scores_learn_which_rows_stay():
    layer = nn.Linear(2, 2)
    model = masked("row_pruning", 0.5, layer, method="topk")
    with torch.no_grad():
        layer.row_scores.copy_(torch.tensor([[0.2], [0.1]]))
    x = torch.tensor([[1.0, 2.0]])
    out = model(x)
    assert out[0, 1] == 0
    out.sum().backward()
    pre = F.linear(x, layer.weight, layer.bias).detach()
    assert torch.allclose(layer.row_scores.grad, pre.view(2, 1), rtol=1e-6)
    with torch.no_grad():
        layer.row_scores -= 1.0 * torch.tensor([[1.0], [0.0]])
    assert model(x)[0, 0] == 0


def test_heads_are_groups_of_columns():
    layer = nn.Linear(6, 2)
    model = masked("head_pruning", 0.5, layer, num_heads=3)
    with torch.no_grad():
        layer.head_scores.copy_(torch.tensor([[0.3, 0.1, 0.2]]))
    x = torch.randn(4, 6)
    columns = torch.tensor([1.0, 1, 0, 0, 1, 1])
    assert torch.equal(model(x), F.linear(x, layer.weight * columns, layer.bias))
    fixed = masked("head_pruning", 0.5, nn.Linear(6, 2), num_heads=3, method="l1")
    with torch.no_grad():
        fixed[0].weight.copy_(torch.tensor([2.0, 1, -4, 4, 1, 1.5]).expand(2, 6))
    assert torch.equal(fixed(x), F.linear(x, fixed[0].weight * torch.tensor([1.0, 1, 1, 1, 0, 0]), fixed[0].bias))
    with pytest.raises(ConfigError, match="num_heads 4 does not divide the 6 columns of 0"):
        masked("head_pruning", 0.5, nn.Linear(6, 2), num_heads=4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, x):
        return self.conv2(F.relu(self.bn1(self.conv1(x))))


def test_channels_go_with_their_normalisation():
    torch.manual_seed(2)
    model = Block()
    with torch.no_grad():
        model.bn1.bias.fill_(0.5)
    group = ({"dense_ratio": 0.5}, ["conv1"], [["conv2", "bn1"]])
    init_compression(model, section("channel_pruning", {"method": "topk"}, cp=group))
    with torch.no_grad():
        model.conv1.channel_scores.copy_(torch.tensor([0.1, 0.4, 0.2, 0.3]).view(4, 1, 1, 1))
    kept = [1, 3]
    x = torch.randn(2, 3, 8, 8)
    out = model(x)
    small = F.conv2d(x, model.conv1.weight[kept], model.conv1.bias[kept])
    small = F.relu(F.batch_norm(small, None, None, model.bn1.weight[kept], model.bn1.bias[kept], training=True))
    assert torch.allclose(out, F.conv2d(small, model.conv2.weight[:, kept], model.conv2.bias), atol=1e-5)
    out.square().mean().backward()
    assert bool((model.conv1.channel_scores.grad != 0).all())  # channels that went can come back
    assert state_of(model.conv1).related == {"channel_pruning": ("conv2", "bn1")}


# -- activations -------------------------------------------------------------------------------------------------------


def activations(layer, calibration, kind="symmetric", bits=4):
    model = nn.Sequential(layer)
    shared = {"range_calibration": calibration, "quantization_type": kind}
    init_compression(model, section("activation_quantization", shared, aq=({"bits": bits}, ["0"])))
    return model


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_dynamic_ranges_are_those_of_tokens_and_images(kind):
    torch.manual_seed(5)
    linear, conv = nn.Linear(6, 2), nn.Conv2d(2, 3, 1)
    x, image = torch.randn(2, 3, 6, requires_grad=True), torch.randn(3, 2, 4, 4)
    tokens = torch.stack([fake_quantize(t, 4, Quantizer(kind)) for t in x.view(6, 6)]).view(2, 3, 6)
    images = torch.stack([fake_quantize(t, 4, Quantizer(kind)) for t in image])
    out = activations(linear, "dynamic", kind)(x)
    assert torch.equal(out, F.linear(tokens, linear.weight, linear.bias))
    assert torch.equal(activations(conv, "dynamic", kind)(image), F.conv2d(images, conv.weight, conv.bias))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad, linear.weight.sum(0).expand(2, 3, 6))


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_inputs_that_were_pruned_have_no_part_in_ranges(kind):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 3))
    settings = section("row_pruning", {"method": "l1"}, rp=({"dense_ratio": 0.5}, ["0"], [["2"]]))
    shared = {"range_calibration": "dynamic", "quantization_type": kind}
    more = section("activation_quantization", shared, aq=({"bits": 4}, ["2"]))
    settings["compression_training"] |= more["compression_training"]
    init_compression(model, settings)
    x = torch.randn(6, 5)
    out = model(x)
    first, last = model[0], model[2]
    kept = first.row_mask.flatten().nonzero().view(-1)
    inner = torch.sigmoid(F.linear(x, first.weight[kept], first.bias[kept]))
    inner = fake_quantize(inner, 4, Quantizer(kind, groups=6))
    assert torch.allclose(out, F.linear(inner, last.weight[:, kept], last.bias), atol=1e-6)


def test_static_ranges_run_with_training_passes():
    layer = nn.Linear(4, 2)
    model = activations(layer, "static")
    first, second = torch.tensor([[-8.0, 0.6, 2.0, 4.0]]), torch.tensor([[-4.0, 1.0, 2.0, 24.0]])
    model.eval()
    model(second)
    assert layer.activation_range.tolist() == [torch.inf, -torch.inf]
    model.train()
    out = model(first)  # s = 2 * 8 / 16
    assert layer.activation_range.tolist() == [-8.0, 4.0]
    assert torch.equal(out, F.linear(torch.tensor([[-8.0, 1.0, 2.0, 4.0]]), layer.weight, layer.bias))
    model(second)
    moved = torch.tensor([-8 * 0.95 - 4 * 0.05, 4 * 0.95 + 24 * 0.05])
    assert torch.allclose(layer.activation_range, moved)
    held = layer.activation_range.clone()
    model.eval()
    model(torch.full((1, 4), 1000.0))
    assert torch.equal(layer.activation_range, held)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_overflows_do_not_stay_in_ranges(value):
    layer = nn.Linear(4, 2)
    model = activations(layer, "static")
    for range_ in ([torch.inf, -torch.inf], [-1.0, 1.0]):
        layer.activation_range.copy_(torch.tensor(range_))
        model(torch.tensor([[0.5, value, 2.0, 4.0]]))
        assert layer.activation_range.tolist() == range_


def test_a_pass_that_backward_runs_again_counts_once():
    layer = nn.Linear(4, 2)
    model = activations(layer, "static")
    grads = []
    for use in (False, True):
        layer.activation_range.copy_(torch.tensor([-1.0, 1.0]))
        x = torch.tensor([[-8.0, 0.6, 2.0, 4.0]], requires_grad=True)
        out = checkpoint(model, x, use_reentrant=False) if use else model(x)
        layer.zero_grad()
        out.square().sum().backward()
        assert torch.allclose(layer.activation_range, torch.tensor([-0.95 - 0.4, 0.95 + 0.2]))
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads)


# -- other layers ------------------------------------------------------------------------------------------------------


def test_embeddings_have_a_scale_for_each_row():
    table = nn.Embedding(3, 4)
    with torch.no_grad():
        table.weight.copy_(torch.tensor([[1.0, -0.4, 0.3, 0.8], [10, -4, 3, 8], [0, 0, 0, 0]]))
    model = nn.Sequential(table)
    init_compression(model, weights(modules=["0"]))
    out = model(torch.tensor([0, 1, 2]))
    assert torch.equal(out[0], fake_quantize(table.weight[0], 4, Quantizer()))
    assert torch.allclose(out[1], out[0] * 10)
    assert torch.equal(out[2], torch.zeros(4))


def test_transposed_layers_of_transformers_also_with_split_passes():
    layer = Conv1D(4, 6)  # 6 inputs, 4 outputs
    model = nn.Sequential(layer)
    init_compression(model, section("row_pruning", {"method": "l1"}, p=({"dense_ratio": 0.5}, ["0"])))
    x = torch.randn(3, 6)
    end = split(model)
    out = model(x)
    end()
    assert torch.equal(out, model(x))
    assert layer.row_mask.shape == (4, 1)
    assert torch.equal((out == 0).all(0), ~layer.row_mask.flatten())


def test_a_fast_path_of_torch_is_not_taken():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = nn.Sequential(layer)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        plain = model(x)
        init_compression(model, weights(bits=3))
        assert not torch.allclose(model(x), plain)
    assert state_of(layer.self_attn.out_proj) is None  # its forward is never called


def test_a_period_of_0_steps_is_one_of_1():
    """Where bits do not fall, scripts of DeepSpeedExamples have it."""
    model = network()
    given = weights(bits=8)
    params = given["compression_training"]["weight_quantization"]["different_groups"]["wq"]["params"]
    params["quantization_period"] = 0
    init_compression(model, given)
    assert {group.technique.period for group in compression_of(model).groups} == {1}
