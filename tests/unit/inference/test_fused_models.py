"""Fused layers of known models against the models themselves."""

from __future__ import annotations

import copy

import pytest
import torch

from mpispeed.base.errors import ConfigError
from mpispeed.inference.fused import HFBertLayerPolicy, LLAMALayerPolicy, inject_kernels
from mpispeed.mesh.backends.solo import solo_comm
from tests.helpers.tiny_models import prompts, tiny_model

CAUSAL = ["gpt2", "opt", "llama", "mistral", "qwen2", "gpt_neo", "gptj", "bloom"]
ENCODERS = ["bert", "roberta"]
MOST_APART = 1e-5  # of logits in fp32, relative to the largest


def pair(family, dtype=torch.float32, **changes):
    """The model, and a copy with fused layers."""
    plain = tiny_model(family, dtype, **changes)
    fused = copy.deepcopy(plain)
    return plain, fused, inject_kernels(fused, tensor=solo_comm(), max_out_tokens=64)


def apart(a, b):
    return float((a.float() - b.float()).abs().max() / a.float().abs().max())


@torch.no_grad()
@pytest.mark.parametrize("family", CAUSAL + ENCODERS)
def test_logits_of_a_pass_are_those_of_the_plain_model(family):
    plain, fused, report = pair(family)
    batch = prompts()
    expected, got = plain(**batch).logits, fused(**batch).logits
    kept = batch["attention_mask"].bool()
    assert len(report.layers) == 3
    assert apart(expected[kept], got[kept]) < MOST_APART


@torch.no_grad()
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("cache", ["dynamic", "growing"])
def test_decoding_gives_the_logits_of_the_plain_model(family, cache):
    plain, fused, report = pair(family)
    given = prompts()
    results = []
    for model, is_ours in ((plain, False), (fused, cache == "growing")):
        batch = dict(given)
        made = report.cache(model, 3) if is_ours else None
        out = model(**batch, past_key_values=made, use_cache=True)
        logits = [out.logits[:, -1]]
        for step in range(12):
            batch["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
            token = torch.full((3, 1), 5 + step)
            positions = batch["attention_mask"].sum(1, keepdim=True) - 1
            extra = {} if family in ("opt", "bloom") else {"position_ids": positions}
            out = model(token, attention_mask=batch["attention_mask"], past_key_values=out.past_key_values, **extra)
            logits.append(out.logits[:, -1])
        results.append(torch.stack(logits))
    assert apart(*results) < MOST_APART


@pytest.mark.parametrize("family", CAUSAL)
def test_greedy_answers_are_those_of_the_plain_model(family):
    plain, fused, report = pair(family)
    batch = prompts()
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 1, "eos_token_id": None}
    expected = plain.generate(**batch, **options)
    assert torch.equal(fused.generate(**batch, **options), expected)
    ours = report.cache(fused, 3)
    assert torch.equal(fused.generate(**batch, **options, past_key_values=ours), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj", "bert"])
def test_narrow_floats_are_as_near_to_fp32_as_the_plain_model(family):
    wide = tiny_model(family)(**prompts()).logits
    plain, fused, _ = pair(family, torch.bfloat16)
    kept = prompts()["attention_mask"].bool()
    errors = [apart(wide[kept], model(**prompts()).logits[kept]) for model in (plain, fused)]
    assert errors[1] < 1.5 * errors[0] + 1e-3


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}]
)
def test_other_ways_to_generate_are_those_of_the_plain_model(options):
    plain, fused, report = pair("llama")
    batch = {name: rows[:1] for name, rows in prompts().items()} if "prompt_lookup_num_tokens" in options else prompts()
    settings = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 1, "eos_token_id": None, **options}
    expected = plain.generate(**batch, **settings)
    assert torch.equal(fused.generate(**batch, **settings), expected)
    if "cache_implementation" not in options:
        ours = report.cache(fused, len(expected))
        assert torch.equal(fused.generate(**batch, **settings, past_key_values=ours), expected)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_assisted_answers_are_those_of_the_plain_model(family):
    plain, fused, report = pair(family)
    assistant = tiny_model(family, num_hidden_layers=1)
    batch = {name: rows[:1] for name, rows in prompts().items()}
    settings = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 1, "eos_token_id": None}
    expected = plain.generate(**batch, **settings)
    assert torch.equal(fused.generate(**batch, **settings, assistant_model=assistant), expected)
    ours = report.cache(fused, 1)
    assert torch.equal(fused.generate(**batch, **settings, assistant_model=assistant, past_key_values=ours), expected)


@torch.no_grad()
def test_more_outputs_are_those_of_the_plain_model():
    plain, fused, _ = pair("llama", attn_implementation="eager")
    asked = {"output_hidden_states": True, "output_attentions": True}
    expected, got = plain(**prompts(), **asked), fused(**prompts(), **asked)
    assert len(got.hidden_states) == 4
    assert len(got.attentions) == 3
    assert max(map(apart, expected.attentions, got.attentions)) < MOST_APART
    assert apart(expected.hidden_states[2], fused(**prompts(), output_hidden_states=True).hidden_states[2]) < MOST_APART


def test_gradients_and_training_run_the_layers_own_forward():
    plain, fused, _ = pair("gpt2")
    for model in (plain, fused):
        model(**prompts()).logits.sum().backward()
    grads = [model.transformer.h[0].attn.c_attn.weight.grad for model in (plain, fused)]
    assert apart(*grads) < MOST_APART


@torch.no_grad()
def test_revert_gives_the_bits_of_the_plain_model():
    plain, fused, report = pair("qwen2")
    report.revert()
    assert not [path for path, module in fused.named_modules() if "forward" in vars(module)]
    assert torch.equal(plain(**prompts()).logits, fused(**prompts()).logits)
    assert len(inject_kernels(fused, tensor=solo_comm()).layers) == 3


def test_a_policy_for_a_layer_class_of_ones_own():
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class OwnLayer(LlamaDecoderLayer):
        pass

    plain = tiny_model("llama")
    plain.model.layers[1].__class__ = OwnLayer
    report = inject_kernels(plain, tensor=solo_comm(), policy={OwnLayer: LLAMALayerPolicy})
    assert list(report.layers.items()) == [("model.layers.1", "LLAMALayerPolicy")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": {"LlamaMLP": HFBertLayerPolicy}}, "has no attention.self"),
        ({"policy": {"OtherLayer": HFBertLayerPolicy}}, "known are BertLayer"),
        ({"policy": {"LlamaDecoderLayer": "o_proj"}}, "expected a policy class"),
        ({"triangular_masking": False}, "is causal"),
        ({"min_out_tokens": 9, "max_out_tokens": 8}, "min_out_tokens is 9 and max_out_tokens 8"),
        ({"min_out_tokens": 1 << 40, "max_out_tokens": 1 << 41}, "576 B a token"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence(change, words):
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=words):
        inject_kernels(model, tensor=solo_comm(), **change)
    assert not [path for path, module in model.named_modules() if "forward" in vars(module)]


def test_a_second_injection_and_an_unknown_model_are_refused():
    model = pair("opt")[1]
    with pytest.raises(ConfigError, match="has a forward of its own already"):
        inject_kernels(model, tensor=solo_comm())
    with pytest.raises(ConfigError, match=r"Sequential has no layer that can be fused; known are BertLayer, .*Qwen2"):
        inject_kernels(torch.nn.Sequential(torch.nn.Linear(2, 2)), tensor=solo_comm())
