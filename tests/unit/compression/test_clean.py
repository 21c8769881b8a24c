"""`redundancy_clean`: the same outputs from smaller layers, codes in exactly so many bytes, and what is refused."""

import copy
import math
import pickle
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.compression import init_compression, redundancy_clean
from mpispeed.compression.packed_layers import packed_weight
from mpispeed.nn.compression import compression_of, state_of

BLOCK = "bert.encoder.layer.0"
HEADS = {"num_heads": 4, "schedule_offset": 0}


def section(name, groups, **shared):
    shared = {"enabled": True, "schedule_offset": 0, **shared}
    return {name: {"shared_parameters": shared, "different_groups": groups}}


def group(params, *modules, related=None):
    more = {} if related is None else {"related_modules": [related]}
    return {"g": {"params": params, "modules": list(modules), **more}}


def config(*sections):
    return {
        "train_batch_size": 1,
        "compression_training": {name: value for own in sections for name, value in own.items()},
    }


def weights(bits, *modules, groups=1, kind="symmetric"):
    params = {"start_bits": bits, "target_bits": bits}
    shared = {"quantize_weight_in_forward": True, "quantize_groups": groups, "quantization_type": kind}
    return section("weight_quantization", group(params, *modules), **shared)


def sparse(*modules):
    return section("sparse_pruning", group({"dense_ratio": 0.5}, *modules), method="l1")


def rows(related=True, method="topk"):
    followers = [r"layer.\d.output.dense"] if related else None
    return section("row_pruning", group({"dense_ratio": 0.4}, "intermediate.dense", related=followers), method=method)


def heads(related=True):
    followers = ["self.query", "self.key", "self.value"] if related else None
    groups = group({"dense_ratio": 0.5}, "attention.output.dense", related=followers)
    return section("head_pruning", groups, method="topk", num_heads=4)


def activations(*modules):
    return section("activation_quantization", group({"bits": 8}, *modules), range_calibration="dynamic")


def bert():
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=80, vocab_size=120,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(settings).eval()
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(param)
    return model


TOKENS = torch.arange(20).view(2, 10) * 5
DENSE = ("attention.self", "intermediate.dense", "output.dense")
SETTINGS = {
    "all": [
        weights(8, *DENSE[:1], DENSE[2], groups=4),
        sparse("self.key"),
        rows(),
        heads(),
        activations("output.dense"),
    ],
    "few bits": [weights(3, "attention.self", groups=64), sparse("self.key"), heads()],
    "asymmetric": [weights(6, "output.dense", groups=2, kind="asymmetric"), sparse("output.dense"), rows(), heads()],
    "ternary": [weights(2, "intermediate.dense", groups=8), rows(method="l1"), sparse("intermediate.dense")],
    "binary": [weights(1, "self.query"), heads()],
    "binary with zeros": [weights(1, "self.query", groups=64), sparse("self.query"), heads()],
    "many bits": [weights(12, "dense"), rows(), heads()],
    "zeros": [weights(8, "intermediate.dense", "attention.output.dense"), rows(related=False), heads(related=False)],
    "embedding": [weights(4, "word_embeddings", "classifier"), rows()],
    "pruned": [rows(), heads(), sparse("attention.output.dense")],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_stay(name):
    settings = config(*SETTINGS[name])
    plain = bert()(TOKENS).logits
    model = init_compression(bert(), settings)
    with torch.no_grad():
        before = model(TOKENS).logits
        assert redundancy_clean(model, settings) is model
        after = model(TOKENS).logits
    assert not torch.allclose(before, plain, atol=1e-3)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-5)
    assert compression_of(model) is None
    for layer in model.modules():
        state = state_of(layer)
        assert state is None or set(state.techniques) == {"activation_quantization"}
    assert not any(name.endswith(("mask", "scores")) for name in model.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(copied(TOKENS).logits, after)


def test_running_ranges_stay():
    static = section("activation_quantization", group({"bits": 8}, "output.dense"), range_calibration="static")
    settings = config(weights(8, "output.dense", kind="asymmetric"), rows(), heads(), static)
    model = init_compression(bert(), settings)
    with torch.no_grad():
        model.train()(TOKENS)
        before = model.eval()(TOKENS).logits
        ranges = {name: value for name, value in model.state_dict().items() if name.endswith("activation_range")}
        after = redundancy_clean(model, settings)(TOKENS).logits
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-5)
    assert len(ranges) == 4
    assert all(torch.equal(model.state_dict()[name], value) for name, value in ranges.items())


def test_layers_get_smaller():
    settings = config(*SETTINGS["all"])
    model = redundancy_clean(init_compression(bert(), settings), settings)
    block = model.bert.encoder.layer[0]
    attention = block.attention.self
    assert (attention.num_attention_heads, attention.all_head_size) == (2, 32)
    assert (attention.query.in_features, attention.query.out_features) == (64, 32)
    assert tuple(attention.query.bias.shape) == (32,)
    assert (block.attention.output.dense.in_features, block.attention.output.dense.out_features) == (32, 64)
    assert (block.intermediate.dense.out_features, block.output.dense.in_features) == (32, 32)
    assert tuple(block.intermediate.dense.weight.shape) == (32, 64)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("groups", [1, 6])
def test_codes_take_the_bytes_of_the_formula(bits, groups):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(15, 6), nn.Linear(6, 3))
    settings = config(weights(bits, "0", groups=groups))
    init_compression(model, settings)
    x = torch.randn(4, 15)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, settings)
        torch.testing.assert_close(model(x), before, atol=1e-6, rtol=1e-6)
    assert "weight" not in dict(model[0].named_parameters())
    held = sum(buffer.nbytes for buffer in model[0].buffers())
    assert held == math.ceil(15 * 6 * bits / 8) + 4 * groups == packed_weight(model[0]).nbytes


def test_groups_that_lose_rows_get_a_scale_for_each_row():
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5))
    pruned = section("row_pruning", group({"dense_ratio": 0.5}, "0", related=["2"]), method="l1")
    settings = config(weights(5, "0", "2", groups=4), pruned)
    redundancy_clean(init_compression(model, settings), settings)
    assert packed_weight(model[0]).nbytes == math.ceil(4 * 10 * 5 / 8) + 4 * 4
    # the columns of what follows cross its groups of ten elements: values stay, quantized
    assert packed_weight(model[2]) is None
    assert tuple(model[2].weight.shape) == (5, 4)


def test_zeros_that_are_no_value_stay_a_parameter():
    model = nn.Sequential(nn.Linear(6, 4))
    nn.init.uniform_(model[0].weight, 0.5, 1.0)
    settings = config(weights(4, "0", kind="asymmetric"), sparse("0"))
    init_compression(model, settings)
    x = torch.randn(3, 6)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, settings)
        torch.testing.assert_close(model(x), before)
    assert packed_weight(model[0]) is None
    assert (model[0].weight == 0).sum() == 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize("followers", [["conv2", "bn1"], None])
def test_channels(method, followers):
    torch.manual_seed(2)
    model, x = Net(), torch.randn(2, 3, 8, 8)
    model(x)  # statistics
    model.eval()
    for bn in (model.bn1, model.bn2):
        nn.init.normal_(bn.weight)
        nn.init.normal_(bn.bias)
    pruned = section("channel_pruning", group({"dense_ratio": 0.5}, "conv1", related=followers), method=method)
    settings = config(weights(8, "conv", groups=2), pruned)
    init_compression(model, settings)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, settings)
        torch.testing.assert_close(model(x), before, atol=1e-6, rtol=1e-5)
    if followers:
        assert (model.conv1.out_channels, model.conv2.in_channels, model.bn1.num_features) == (4, 4, 4)
        assert tuple(model.conv2.weight.shape) == (4, 4, 3, 3)
        assert packed_weight(model.conv2) is not None


def test_convolutions_in_groups_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 6, 3))
    for first, last in (("0", "1"), ("1", "2")):
        groups = group({"dense_ratio": 0.5}, first, related=[last])
        with pytest.raises(ConfigError, match="in groups"):
            init_compression(model, config(section("channel_pruning", groups, method="l1")))


class Gated(nn.Module):
    """Two layers that feed one; of two more layers one follows the first alone."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down, self.side = (nn.Linear(*shape) for shape in [(6, 16), (6, 16), (16, 6), (16, 6)])

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def gated(followers):
    groups = {"params": {"dense_ratio": 0.5}, "modules": ["gate", "up"], "related_modules": followers}
    return config(weights(8, "gate"), section("row_pruning", {"g": groups}, method="topk"))


def test_layers_that_feed_one_lose_the_same():
    torch.manual_seed(4)
    settings, x = gated([["down"], ["down"]]), torch.randn(3, 6)
    model = init_compression(Gated(), settings)
    with torch.no_grad():
        before = model(x)
        torch.testing.assert_close(redundancy_clean(model, settings)(x), before, atol=1e-6, rtol=1e-5)
    width = model.down.in_features
    assert 0 < width < 8
    assert (model.gate.out_features, model.up.out_features) == (width, width)


def test_followers_that_lose_different_inputs_are_refused():
    torch.manual_seed(4)
    settings = gated([["down", "side"], ["down"]])
    with pytest.raises(ConfigError, match="layers that follow gate lose different inputs"):
        redundancy_clean(init_compression(Gated(), settings), settings)


@pytest.mark.parametrize("index", [torch.tensor([-1]), torch.tensor([120]), torch.ones(120, dtype=torch.uint8)])
def test_packed_embeddings_refuse_what_embeddings_do(index):
    settings = config(weights(8, "0"))
    plain = nn.Sequential(nn.Embedding(120, 8))
    with pytest.raises((IndexError, RuntimeError)):
        plain(index)
    model = redundancy_clean(init_compression(plain, settings), settings)
    with pytest.raises((IndexError, RuntimeError)):
        model(index)


def test_the_section_alone_will_do():
    settings = config(sparse("0"))
    model = init_compression(nn.Sequential(nn.Linear(4, 4)), settings["compression_training"])
    assert (
        compression_of(model).groups
        == compression_of(init_compression(nn.Sequential(nn.Linear(4, 4)), settings)).groups
    )


def test_conv1d():
    torch.manual_seed(3)
    model = nn.Sequential(Conv1D(16, 12), nn.GELU(), Conv1D(12, 16)).eval()
    pruned = section("row_pruning", group({"dense_ratio": 0.5}, "0", related=["2"]), method="topk")
    settings = config(weights(4, "0", "2", groups=12), pruned)
    init_compression(model, settings)
    x = torch.randn(2, 3, 12)
    with torch.no_grad():
        before = model(x)
        redundancy_clean(model, settings)
        torch.testing.assert_close(model(x), before, atol=1e-6, rtol=1e-5)
    assert (model[0].nx, model[0].nf, model[2].nx, model[2].nf) == (12, 8, 8, 12)
    assert packed_weight(model[0]).nbytes == 12 * 8 // 2 + 4 * 12


def test_a_new_model_takes_the_state_of_a_trained_one():
    settings = config(*SETTINGS["all"])
    trained = init_compression(bert(), settings)
    with torch.no_grad():
        for param in trained.parameters():
            param.add_(0.1 * torch.randn_like(param))
        before = trained(TOKENS).logits
    fresh = init_compression(bert(), settings)
    fresh.load_state_dict(trained.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(redundancy_clean(fresh, settings)(TOKENS).logits, before, atol=1e-6, rtol=1e-5)
    other = redundancy_clean(init_compression(bert(), settings), settings)
    other.load_state_dict(fresh.state_dict())
    with torch.no_grad():
        assert torch.equal(other(TOKENS).logits, fresh(TOKENS).logits)


def test_casts_keep_scales():
    settings = config(weights(8, "0"))
    model = redundancy_clean(init_compression(nn.Sequential(nn.Linear(32, 4)), settings), settings)
    scales, values = model[0].weight_scales.clone(), model[0].weight
    model.bfloat16()
    assert torch.equal(model[0].weight_scales, scales)
    assert torch.equal(model[0].weight, values.bfloat16())
    assert model(torch.randn(2, 32).bfloat16()).dtype == torch.bfloat16
    x = torch.randn(2, 32).bfloat16().requires_grad_()
    model(x).sum().backward()
    assert torch.equal(x.grad[0], model[0].weight.sum(0))


def test_what_is_not_in_its_last_state_is_told(caplog):
    settings = config(sparse("0") | weights(8, "0"))
    settings["compression_training"]["sparse_pruning"]["shared_parameters"]["schedule_offset"] = 10
    with caplog.at_level("WARNING", logger="mpispeed"):
        model = redundancy_clean(init_compression(nn.Sequential(nn.Linear(4, 4)), settings), settings)
    assert "0 (sparse_pruning)" in caplog.text
    assert (model[0].weight == 0).sum() == 8


def test_other_settings_and_missing_values_are_refused():
    model = init_compression(nn.Sequential(nn.Linear(4, 4)), config(sparse("0")))
    with pytest.raises(ConfigError, match="other settings"):
        redundancy_clean(model, config(weights(8, "0")))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="no values on this rank"):
        redundancy_clean(model, config(weights(8, "0")))


def test_torchao_that_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"needs torchao 0\.18 or later"):
        redundancy_clean(model, config(weights(8, "0")), form="torchao")
    assert packed_weight(model[0]) is None
    assert compression_of(model) is None
