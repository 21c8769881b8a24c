"""Quantized layers and models: codes in place of weights, what is chosen, casts, copies, saved states, trained GPT."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.inference import quantized as q
from mpispeed.inference.quantized.layers import codes_of
from mpispeed.native import weight_codes

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make().eval()


def gpt2():
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=120, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=96,
        vocab_size=120, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=64, intermediate_size=128, vocab_size=120
    )
    return transformers.BertForMaskedLM(config)


LAYERS = [
    (lambda: nn.Linear(64, 40), (3, 64)),
    (lambda: nn.Linear(50, 40, bias=False), (2, 5, 50)),
    (lambda: Conv1D(40, 64), (2, 3, 64)),
]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_a_layer_computes_with_its_codes(bits, make, shape):
    layer = seeded(make)
    weight, x = layer.weight.detach().clone(), torch.randn(shape)
    plain = copy.deepcopy(layer)
    assert q.quantize_module(layer, q.Format(bits, 32)) is layer
    assert layer.weight is None and q.is_quantized(layer) and not q.is_quantized(plain)
    assert {"weight_codes", "weight_scales"} == set(dict(layer.named_buffers()))
    found = q.dequantized(layer)
    assert found.shape == weight.shape and (found - weight).abs().max() < weight.abs().max() / (2 ** (bits - 1) - 1)
    plain.weight.data = found
    with torch.no_grad():
        assert torch.allclose(layer(x), plain(x), atol=1e-5)
    with pytest.raises(UsageError, match="no such form"):
        q.quantize_module(layer, q.Format())


def test_a_table_gives_rows_in_the_dtype_it_was_cast_to():
    table = seeded(lambda: nn.Embedding(30, 64, padding_idx=0))
    index = torch.tensor([[3, 3, 0], [29, 1, 2]])
    whole = table(index).detach()
    q.quantize_module(table, q.Format(8, 32, is_symmetric=False))
    assert torch.equal(table(index), q.dequantized(table)[index]) and (table(index) - whole).abs().max() < 0.05
    scales = table.weight_scales.clone()
    table.to(torch.bfloat16)
    assert table(index).dtype == torch.bfloat16 and torch.equal(table.weight_scales, scales)
    table.double()
    assert table(index).dtype == torch.float64


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 8), lambda: Conv1D(8, 64)])
def test_casts_leave_scales_and_offsets_as_they_are(make):
    layer = seeded(make)
    q.quantize_module(layer, q.Format(4, 32, is_symmetric=False))
    kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for cast in (torch.bfloat16, torch.float16, torch.float32):
        layer.to(cast)
        assert layer.bias.dtype == cast and layer(torch.randn(2, 64, dtype=cast)).dtype == cast
        assert all(torch.equal(buffer, kept[name]) for name, buffer in layer.named_buffers())
    assert layer.to("meta").weight_scales.is_meta and layer.weight_scales.dtype == torch.float32
    assert layer.to_empty(device="cpu").weight_offsets.dtype == torch.float32


def test_copies_and_saved_states():
    layer = seeded(lambda: nn.Linear(64, 8))
    other = copy.deepcopy(layer)
    q.quantize_module(layer, q.Format(4, 32))
    x = torch.randn(2, 64)
    twin = copy.deepcopy(layer)
    layer.weight_scales.mul_(2)
    assert not torch.equal(twin(x), layer(x))
    with torch.no_grad():
        other.weight.zero_()
    q.quantize_module(other, q.Format(4, 32))
    other.load_state_dict(layer.state_dict())
    assert set(layer.state_dict()) == {"bias", "weight_codes", "weight_scales"}
    assert torch.equal(other(x), layer(x))


def test_groups_along_outputs():
    layer, conv = seeded(lambda: nn.Linear(48, 64)), seeded(lambda: Conv1D(48, 64))
    for module in (layer, conv):  # dim 0 of [64, 48] and dim 1 of [64, 48]
        weight, x = module.weight.detach().clone(), torch.randn(3, 48 if module is layer else 64)
        q.quantize_module(module, q.Format(4, 16, is_along_inputs=False, is_symmetric=False))
        assert codes_of(module).scales.shape == ((4, 48) if module is layer else (3, 64))
        found = q.dequantized(module)
        assert (found - weight).abs().max() < weight.abs().max() / 7
        wanted = x @ (found.t() if module is layer else found) + module.bias
        assert torch.allclose(module(x), wanted, atol=1e-5)


def kinds(report):
    return set(report.quantized), set(report.whole)


def test_layers_of_blocks_are_chosen():
    report = q.quantize_model(seeded(gpt2), q.QuantOptions(bits=8))
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    chosen, whole = kinds(report)
    assert chosen == {f"transformer.h.{i}.{name}" for i in range(2) for name in names}
    assert whole == {"transformer.wte", "transformer.wpe", "lm_head"}
    weights = 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256)
    assert report.bytes_before == 4 * weights
    scales = 4 * 2 * (192 + 64 + 256 + 64 * 2)  # 256 inputs are two groups
    assert report.bytes_after == weights + scales
    assert "8 layers quantized, 3 left whole" in str(report)
    report = q.quantize_model(seeded(llama), q.QuantOptions(bits=4, qkv=False, skip=("mlp.down",), heads=True))
    chosen, whole = kinds(report)
    assert chosen == {"lm_head"} | {
        f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert report.whole["model.layers.0.self_attn.q_proj"] == "queries, keys and values are left out"
    assert report.whole["model.layers.1.mlp.down_proj"] == "skipped by 'mlp.down'"
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    chosen, whole = kinds(q.quantize_model(plain, q.QuantOptions()))
    assert (chosen, whole) == ({"0"}, {"2"})  # 128 elements are too few


def test_shared_weights_are_coded_once_or_not_at_all():
    model, x = seeded(gpt2), torch.arange(12)[None]
    wanted = model(x).logits
    report = q.quantize_model(copy.deepcopy(model), q.QuantOptions(heads=True))
    assert report.whole["lm_head"] == "its weight is that of transformer.wte, too"
    report = q.quantize_model(model, q.QuantOptions(heads=True, embeddings=True))
    assert report.quantized["lm_head"] == "the codes of transformer.wte"
    assert model.lm_head.weight_codes is model.transformer.wte.weight_codes
    assert (model(x).logits - wanted).abs().max() < 0.1 * wanted.abs().max()


@pytest.mark.parametrize("make", [gpt2, llama, bert])
@pytest.mark.parametrize("bits", [8, 4])
def test_models_give_nearly_their_logits(make, bits):
    model, x = seeded(make), torch.arange(30).view(2, 15)
    with torch.no_grad():
        wanted = model(x).logits
        q.quantize_model(model, q.QuantOptions(bits=bits, group_size=32))
        error = (model(x).logits - wanted).norm() / wanted.norm()
        assert 0 < error < (0.02 if bits == 8 else 0.2)
        if make is not bert:
            few = model(x[:1, :5]).logits  # by the loop of few rows, and by panels above
            assert torch.allclose(few, model(x).logits[:1, :5], atol=1e-4)
            tokens = model.generate(x[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
            assert tokens.shape == (2, 7)


def test_a_model_on_meta_takes_the_codes_of_another():
    model = seeded(llama)
    with torch.device("meta"):
        empty = llama().eval()
    options = q.QuantOptions(bits=4, heads=True)
    q.quantize_model(model, options)
    report = q.quantize_model(empty, options)
    assert report.bytes_after * 7 < report.bytes_before  # 4.5 bits for 32
    assert all(x.is_meta for x in empty.state_dict().values())
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.model.rotary_emb = model.model.rotary_emb
    x = torch.arange(12)[None]
    assert torch.equal(empty(x).logits, model(x).logits)


def test_layers_finished_one_by_one():
    model = seeded(llama)
    at_once = copy.deepcopy(model)
    report = q.quantize_model(at_once, q.QuantOptions())
    quantizer = q.Quantizer(model, q.QuantOptions())
    for path, module in list(model.named_modules()):
        is_layer = path in report.quantized
        assert quantizer.finish(path) == is_layer == q.is_quantized(module)
    assert quantizer.paths == [] and quantizer.report == report
    state = at_once.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def mixtral():
    config = transformers.MixtralConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=96,
        vocab_size=120, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_kept_in_tensors(bits):
    model, x = seeded(mixtral), torch.arange(30).view(2, 15)
    module = model.model.layers[1].mlp.experts
    params = {name: param.detach().clone() for name, param in module.named_parameters()}
    with torch.no_grad():
        wanted = model(x).logits
        report = q.quantize_model(model, q.QuantOptions(bits=bits, group_size=32))
        assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} < set(
            report.quantized
        )
        assert type(model.model.layers[0].mlp.gate.weight) is nn.Parameter
        error = (model(x).logits - wanted).norm() / wanted.norm()
        assert 0 < error < (0.02 if bits == 8 else 0.2)
        twin = seeded(mixtral, 1)
        for name in params:
            found = q.dequantized(module, name=name)
            assert found.shape == params[name].shape and (found - params[name]).abs().max() < 0.02
            twin.model.layers[1].mlp.experts.get_parameter(name).copy_(found)
        tokens = torch.randn(9, 64)
        chosen = torch.tensor([[0, 1], [3, 0], [1, 3]]).repeat(3, 1)  # nobody wants expert 2
        weights = torch.rand(9, 2)
        assert torch.allclose(
            module(tokens, chosen, weights), twin.model.layers[1].mlp.experts(tokens, chosen, weights), atol=1e-5
        )
        kept = module.gate_up_proj_scales.clone()
        assert torch.equal(model.to(torch.bfloat16).model.layers[1].mlp.experts.gate_up_proj_scales, kept)
        assert model(x).logits.dtype == torch.bfloat16
    report = q.quantize_model(seeded(mixtral), q.QuantOptions(experts=False))
    assert report.whole["model.layers.0.mlp.experts"] == "experts"
    rules = (("experts", q.Rule(4, 32)),)
    report = q.quantize_model(seeded(mixtral), q.QuantOptions(named=rules, only_named=True))
    assert len(report.quantized) == 4 and set(report.quantized.values()) == {"int4, groups of 32, with offsets"}
    for rule, text in ((q.Rule(8, 40), r"experts\.gate_up_proj: groups of 40 do not"), (q.Rule(8, 32, 0), "use 1")):
        with pytest.raises(ConfigError, match=text):
            q.quantize_model(seeded(mixtral), q.QuantOptions(named=(("experts", rule),), only_named=True))


def test_rules_for_names():
    rules = q.rules_of(
        {
            "self_attn.q": {"num_bits": 4, "group_size": 32, "group_dim": 0},
            "mlp": {"num_bits": 8, "group_size": 32, "symmetric": True},
            "embed": {"num_bits": 8, "group_size": 64},
        }
    )
    options = q.QuantOptions(named=tuple(rules.items()), only_named=True)
    model, x = seeded(llama), torch.arange(12)[None]
    wanted = model(x).logits
    report = q.quantize_model(model, options)
    first = {path: how for path, how in report.quantized.items() if "layers.1" not in path}
    assert first == {
        "model.embed_tokens": "int8, groups of 64, with offsets",
        "model.layers.0.self_attn.q_proj": "int4, groups of 32 along outputs, with offsets",
        **{f"model.layers.0.mlp.{name}_proj": "int8, groups of 32" for name in ("gate", "up", "down")},
    }
    assert report.whole["lm_head"] == "no rule names it"
    assert (model(x).logits - wanted).norm() < 0.1 * wanted.norm()
    for bad, text in (
        ({"q_proj": {"group_size": 24}}, r"layers\.0\.self_attn\.q_proj: groups of 24 do not divide 64 inputs"),
        ({"q_proj": {}, "self_attn": {}}, "q_proj matches q_proj and self_attn"),
        ({"nothing": {}}, "post_init_quant.nothing is in the path of no layer"),
        ({"q_proj": {"num_bits": 3}}, r"post_init_quant\.q_proj\.num_bits is 3"),
        ({"q_proj": {"group_dim": 2}}, "group_dim is 2"),
        ({"q_proj": {"group_size": 0}}, "group_size is 0"),
        ({"q_proj": {"num_bits": 4, "group_size": 5}}, "group_size is 5"),
        ({"q_proj": {"symmetric": "no"}}, "symmetric is 'no'"),
        ({"q_proj": {"bits": 4}}, r"q_proj\.bits is not known"),
        ({"q_proj": 4}, "q_proj is 4"),
    ):
        with pytest.raises(ConfigError, match=text):
            options = q.QuantOptions(named=tuple(q.rules_of(bad).items()), only_named=True)
            q.quantize_model(seeded(llama), options)


def test_options_from_settings():
    def of(quant, is_int8=True):
        return q.options_of(quant, is_int8=is_int8)

    assert of({}) == q.QuantOptions() and of({}, is_int8=False) is None
    assert of({"enabled": False}) is None and of({"weight": {"enabled": False}}) is None
    assert of({"weight": {"num_bits": 4, "q_type": "asymmetric"}, "qkv": {"enabled": False}}) == q.QuantOptions(
        bits=4, symmetric=False, qkv=False
    )
    options = of({"weight": {"mlp_extra_grouping": True, "q_groups": 8}})
    assert options == q.QuantOptions(groups=8, mlp_extra=True)
    assert options.group_of(1024, is_mlp=False) == 128 and options.group_of(1024, is_mlp=True) == 64
    assert options.group_of(72, is_mlp=False) == 16 and q.QuantOptions(groups=1).group_of(4096, is_mlp=False) == 4096
    assert q.QuantOptions(bits=4, mlp_extra=True).group_of(1024, is_mlp=True) == 32
    rule = {"num_bits": 4, "group_size": 32}
    assert of({"weight": {"post_init_quant": {"mlp": rule}}}, is_int8=False) == q.QuantOptions(
        named=(("mlp", q.Rule(4, 32)),), only_named=True
    )
    assert of({"weight": {"quantized_initialization": rule}}, is_int8=False) == q.QuantOptions(
        bits=4, group_size=32, symmetric=False
    )
    with pytest.raises(ConfigError, match=r"quantized_initialization\.group_dim is 0"):
        of({"weight": {"quantized_initialization": {"group_dim": 0}}})
    for wrong, text in (
        ({"bits": 3}, "3 bits"),
        ({"bits": 4, "group_size": 7}, "groups of 7"),
        ({"groups": 0}, "0 gr"),
    ):
        with pytest.raises(ConfigError, match=text):
            q.QuantOptions(**wrong)


def test_models_without_a_layer_for_it_are_refused():
    with pytest.raises(ConfigError, match="no layer for it; 0 is whole: fewer than 1024 elements"):
        q.quantize_model(nn.Sequential(nn.Linear(4, 4)), q.QuantOptions())
    with pytest.raises(ConfigError, match="no layer for it"):
        q.quantize_model(nn.LayerNorm(4), q.QuantOptions())
    with pytest.raises(UsageError, match="renormalises"):
        q.quantize_module(nn.Embedding(10, 8, max_norm=1.0), q.Format())


class Foreign(torch.Tensor):
    """A tensor as libraries of quantization make them."""


def test_weights_of_other_libraries_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Foreign))
    report = q.quantize_model(model, q.QuantOptions())
    assert report.whole == {"0": "its weight is of the kind Foreign, of another library"}
    assert type(model[0].weight) is Foreign and q.is_quantized(model[1])
    with pytest.raises(UsageError, match="Foreign"):
        q.quantize_module(model[0], q.Format())


class OwnLinear(nn.Linear):
    def forward(self, x):
        return x @ self.weight.t()


def test_layers_with_their_own_forward_are_reported():
    model = nn.Sequential(OwnLinear(64, 64), nn.Linear(64, 64))
    report = q.quantize_model(model, q.QuantOptions())
    assert report.whole == {"0": "OwnLinear has its own forward"}
    with pytest.raises(UsageError, match="no such form"):
        q.quantize_module(model[0], q.Format())


def test_a_decode_step_never_holds_a_whole_matrix(monkeypatch):
    layer = seeded(lambda: nn.Linear(64, 512))
    q.quantize_module(layer, q.Format(8, 64))
    monkeypatch.setattr(weight_codes, "PANEL", 32 * 64)
    sizes, make = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: sizes.append((made := make(*a, **k)).numel()) or made)
    with torch.no_grad():
        layer(torch.randn(1, 64))
        assert sizes == [512]
        layer(torch.randn(20, 64))
        assert sizes[1:] == [20 * 512, 32 * 64]


@pytest.fixture(scope="module")
def trained():
    """The example's GPT after a few steps, and windows that it has not seen."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, Shape
    from text import Windows, standard_library

    seen, held_out = (Windows(text, 64) for text in standard_library(600_000))
    model = seeded(lambda: GPT(Shape(layers=2, heads=2, width=64, block=64))).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    dice = torch.Generator().manual_seed(0)
    for _ in range(120):
        batch = [seen[i] for i in torch.randint(len(seen), (12,), generator=dice).tolist()]
        loss = model(*(torch.stack(column) for column in zip(*batch, strict=True)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    windows = [held_out[i] for i in range(0, len(held_out), max(1, len(held_out) // 60))]
    return model.eval(), [torch.stack(column) for column in zip(*windows, strict=True)]


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.03)])
def test_perplexity_of_the_trained_example(trained, bits, most):
    model, (x, y) = trained
    with torch.no_grad():
        whole = math.exp(model(x, y))
        assert whole < 20  # it has learned: 256 is chance
        coded = copy.deepcopy(model)
        q.quantize_model(coded, q.QuantOptions(bits=bits, group_size=64))
        assert abs(math.exp(coded(x, y)) / whole - 1) < most
