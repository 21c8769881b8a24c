"""Fused layers of sliced models: the answers of the model in one piece."""

from __future__ import annotations

import copy

import pytest
import torch

from mpispeed.inference.fused import inject_kernels
from mpispeed.inference.slicing import slice_model
from tests.helpers.tiny_models import prompts, tiny_model

pytestmark = pytest.mark.mpi(min_size=1)

MOST_APART = 1e-5  # of logits in fp32, relative to the largest: sums over ranks have another order


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "mistral", "qwen2", "gpt_neo", "gptj", "bert"])
def test_sliced_and_fused_layers_answer_as_the_whole_model(comm, family):
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
