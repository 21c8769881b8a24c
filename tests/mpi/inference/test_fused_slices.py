"""Fused layers of sliced models: the answers of the model in one piece."""

from __future__ import annotations

import copy

import pytest
import torch

import mpispeed
from mpispeed.inference.fused import GrowingLayer, inject_kernels
from mpispeed.inference.fused.layers import FusedLayer
from mpispeed.inference.slicing import slice_model
from tests.helpers.tiny_models import prompts, tiny_model

pytestmark = pytest.mark.mpi(min_size=1)

MOST_APART = 1e-5  # of logits in fp32, relative to the largest: sums over ranks have another order


@pytest.mark.ranks(3)  # uneven heads; one rank is in tests/unit
@pytest.mark.parametrize("family", ["opt", "llama", "mistral", "qwen2", "gpt_neo", "bloom", "bert"])
def test_unevenly_sliced_and_fused_layers_answer_as_the_whole_model(comm, family):
    check(comm, family)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj"])
def test_sliced_and_fused_layers_answer_as_the_whole_model(comm, family):
    check(comm, family)


def check(comm, family):
    whole = tiny_model(family)
    cut = copy.deepcopy(whole)
    slice_model(cut, comm)
    report = inject_kernels(cut, tensor=comm, max_out_tokens=64)
    assert len(report.layers) == 3
    batch = prompts()
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        expected, got = whole(**batch).logits[kept], cut(**batch).logits[kept]
    assert float((expected - got).abs().max() / expected.abs().max()) < MOST_APART
    if family == "bert":
        return
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 1, "eos_token_id": None}
    cache = report.cache(cut, 3)
    assert torch.equal(cut.generate(**batch, **options, past_key_values=cache), whole.generate(**batch, **options))


@pytest.mark.ranks(1, 2)
def test_an_engine_with_fused_layers_answers_as_the_model(comm, monkeypatch):
    plain = tiny_model("llama")
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 1, "eos_token_id": None}
    expected = plain.generate(**prompts(), **options)
    settings = {"dtype": "fp32", "tensor_parallel": {"tp_size": comm.size}, "replace_with_kernel_inject": True}
    engine = mpispeed.init_inference(copy.deepcopy(plain), max_out_tokens=32, **settings)
    made = []
    monkeypatch.setattr(GrowingLayer, "update", count(GrowingLayer.update, made))
    assert torch.equal(engine.generate(**prompts(), **options), expected)
    assert len(made) == 3 * 12
    made.clear()
    assert torch.equal(engine.generate(**prompts(), **options, cache_implementation="static"), expected)
    assert torch.equal(engine.generate(**prompts(), **options, use_cache=False), expected)
    assert not made
    engine.destroy()


def count(function, made):
    def counted(*args, **kwargs):
        made.append(1)
        return function(*args, **kwargs)

    return counted


@pytest.mark.ranks(1, 2)
def test_policies_are_given_as_deepspeed_has_them(comm):
    from transformers.models.bert.modeling_bert import BertLayer

    plain = tiny_model("bert")
    engine = mpispeed.init_inference(
        copy.deepcopy(plain), dtype="fp32", mp_size=comm.size,
        injection_policy={BertLayer: mpispeed.inference.HFBertLayerPolicy},
    )  # fmt: skip
    kept = prompts()["attention_mask"].bool()
    with torch.no_grad():
        expected, got = plain(**prompts()).logits[kept], engine(**prompts()).logits[kept]
    assert isinstance(engine.bert.encoder.layer[0].forward, FusedLayer)
    assert float((expected - got).abs().max() / expected.abs().max()) < MOST_APART
    engine.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj"])
def test_fused_layers_read_codes_of_quantized_weights(comm, family):
    plain = tiny_model(family)
    engines = [
        mpispeed.init_inference(
            copy.deepcopy(plain), dtype="int8", tp={"tp_size": comm.size}, replace_with_kernel_inject=is_fused
        )
        for is_fused in (False, True)
    ]
    kept = prompts()["attention_mask"].bool()
    with torch.no_grad():
        expected, got = (engine(**prompts()).logits[kept] for engine in engines)
    assert float((expected - got).abs().max() / expected.abs().max()) < MOST_APART
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 1, "eos_token_id": None}
    assert torch.equal(*(engine.generate(**prompts(), **options) for engine in engines))
    for engine in engines:
        engine.destroy()
