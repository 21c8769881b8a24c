"""Sliced models without values, policies of users, caches, samples and narrow floats."""

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.inference.buffers import remake_buffers
from mpispeed.inference.slicing import slice_model
from mpispeed.nn.tensor import cuts
from tests.helpers.hub_models import VOCAB, batch, build, builders

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3)]

BOUND = 1e-5
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def fill(comm, model, plain):
    """Give a sliced model without values the slices of another's."""
    known, whole, made = cuts(model), dict(plain.named_parameters(remove_duplicate=False)), {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            full = f"{path}.{name}" if path else name
            if param is not None:
                cut = known.get(full)
                values = whole[full].detach() if cut is None else cut.take(whole[full], comm.rank, comm.size)
                assert values.shape == param.shape, full
                module._parameters[name] = made.setdefault(id(param), nn.Parameter(values))


@pytest.mark.parametrize(
    "name",
    ["gpt2", "opt", "llama", "mistral", "qwen2", "bloom", "mixtral", "gpt_neo", "gptj", "gpt_neox", "bert", "t5"],
)
def test_model_without_values(comm, name):
    """Only what is small stays whole; `cuts` and `remake_buffers` tell all that a loader has to know."""
    plain = build(name).eval()
    with torch.device("meta"):
        model = builders()[name]().eval()
    slice_model(model, comm, without_values=True)
    assert all(param.is_meta for param in model.parameters())
    known = cuts(model)
    for path, param in model.named_parameters():
        if path not in known:
            assert param.dim() == 1 or param.numel() <= 100 * 24
    fill(comm, model, plain)
    remake_buffers(model)
    for (path, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected), path
    with torch.no_grad():
        assert (model(**no_labels(name)).logits - plain(**no_labels(name)).logits).abs().max() <= BOUND


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom"])
def test_static_cache(comm, name):
    plain, model = build(name).eval(), build(name).eval()
    slice_model(model, comm)
    tokens = batch()["input_ids"]
    for options in ({}, {"prefill_chunk_size": 5}):
        options = GREEDY | options | {"cache_implementation": "static"}
        assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))


def test_cache_that_is_passed_on(comm):
    plain, model = build("llama").eval(), build("llama").eval()
    slice_model(model, comm)
    tokens = batch()["input_ids"]
    found = []
    for one in (plain, model):
        with torch.no_grad():
            first = one(tokens[:, :7], use_cache=True)
            found.append(one(tokens[:, 7:], past_key_values=first.past_key_values).logits)
    assert (found[0] - found[1]).abs().max() <= BOUND


def test_ranks_sample_the_same_tokens(comm):
    torch.manual_seed(comm.rank)
    model = build("gpt2", seed=3).eval()
    torch.manual_seed(comm.rank)
    slice_model(model, comm)
    found = model.generate(batch()["input_ids"], max_new_tokens=8, do_sample=True, top_k=0)
    assert all(torch.equal(other, found) for other in comm.gather_objects(found))
    assert found[:, -8:].unique().numel() > 4


def test_perplexity_in_bf16(comm):
    plain, model = build("llama").to(torch.bfloat16).eval(), build("llama").to(torch.bfloat16).eval()
    slice_model(model, comm)
    with torch.no_grad():
        expected, found = (one(**batch(length=24)).loss.float().exp().item() for one in (plain, model))
    assert abs(found / expected - 1) < 0.005


def no_labels(name):
    """A batch without labels, with inputs of a decoder where there is one."""
    data = {key: value for key, value in batch().items() if key != "labels"}
    return data | ({"decoder_input_ids": data["input_ids"]} if name == "t5" else {})


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("t5", {"T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}),
        ("roberta", {"RobertaLayer": "output.dense"}),
        ("bert", {"BertLayer": ("attention.output.dense", "output.dense")}),
        ("gpt2", ("attn.c_proj", "mlp.c_proj")),
        ("bloom", {"BloomBlock": ("self_attention.dense", "mlp.dense_4h_to_h")}),
        ("llama", {r".*\.(q|k|v)_proj": "column", "o_proj": "row", "up_proj": "column", "lm_head": "vocab"}),
    ],
    ids=str,
)
def test_policies_of_users(comm, name, policy):
    plain, model = build(name).eval(), build(name).eval()
    report = slice_model(model, comm, policy=policy)
    assert all("policy" in how or how == "vocab" for how in report.cut.values())
    with torch.no_grad():
        assert (model(**no_labels(name)).logits - plain(**no_labels(name)).logits).abs().max() <= BOUND


def test_policy_of_init_inference(comm):
    """Classes, as in DeepSpeed's tutorial; and its error, on all ranks."""
    from transformers.models.t5.modeling_t5 import T5Block

    plain, settings = build("t5").eval(), {"dtype": "fp32", "tensor_parallel": {"tp_size": comm.size}}
    policy = {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}
    engine = mpispeed.init_inference(build("t5"), **settings, injection_policy=policy)
    data = {key: value for key, value in batch().items() if key != "labels"}
    assert torch.equal(engine.generate(**data, **GREEDY), plain.generate(**data, **GREEDY))
    engine.destroy()
    with pytest.raises(ConfigError, match=r"'SelfAttention.out' of T5Block is not valid.*did you mean"):
        mpispeed.init_inference(build("t5"), **settings, injection_policy={T5Block: "SelfAttention.out"})


def test_t5_answers(comm):
    plain, model = build("t5").eval(), build("t5").eval()
    slice_model(model, comm)
    data = {key: value for key, value in batch().items() if key != "labels"}
    assert torch.equal(model.generate(**data, **GREEDY), plain.generate(**data, **GREEDY))


def test_more_ranks_than_heads(comm):
    model = build("gpt2", n_head=1)
    with pytest.raises(ConfigError, match=r"has 1 heads, fewer than the . ranks"):
        slice_model(model, comm)


def test_vocabulary_of_any_size(comm):
    plain, model = build("llama", vocab_size=VOCAB + 1).eval(), build("llama", vocab_size=VOCAB + 1).eval()
    slice_model(model, comm)
    with torch.no_grad():
        found = model(batch()["input_ids"]).logits
        assert found.shape[-1] == VOCAB + 1
        assert (found - plain(batch()["input_ids"]).logits).abs().max() <= BOUND
