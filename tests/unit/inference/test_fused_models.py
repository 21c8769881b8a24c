"""Fused layers of known models against the models themselves."""

from __future__ import annotations

import copy

import pytest
import torch

from mpispeed.inference.fused import inject_kernels
from mpispeed.mesh.backends.solo import solo_comm
from tests.helpers.tiny_models import prompts, tiny_model

CAUSAL = ["gpt2", "opt", "llama", "mistral", "qwen2", "gpt_neo", "gptj"]
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
        made = report.cache(model.config, 3, torch.device("cpu")) if is_ours else None
        out = model(**batch, past_key_values=made, use_cache=True)
        logits = [out.logits[:, -1]]
        for step in range(12):
            batch["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
            token = torch.full((3, 1), 5 + step)
            positions = batch["attention_mask"].sum(1, keepdim=True) - 1
            extra = {} if family == "opt" else {"position_ids": positions}
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
    ours = report.cache(fused.config, 3, torch.device("cpu"))
    assert torch.equal(fused.generate(**batch, **options, past_key_values=ours), expected)
