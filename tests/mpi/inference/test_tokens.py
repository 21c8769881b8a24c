"""Greedy tokens and logits of sliced models are those of the plain models, prompts of unequal length in one batch."""

import pytest
import torch

from mpispeed.inference.slicing import slice_model
from tests.helpers.hub_models import VOCAB, build

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3)]

BOUND = 1e-5
"""Absolute, of logits about 1: fp32 sums in another order."""

CASES = [
    ("gpt2", {}),
    ("gpt2", {"n_head": 6}),
    ("opt", {"num_attention_heads": 3}),
    ("llama", {}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    ("mistral", {}),
    ("qwen2", {}),
    ("bloom", {}),
    ("bloom", {"n_head": 6}),
    ("mixtral", {}),
    ("gpt_neo", {}),
    ("gptj", {}),
    ("gpt_neox", {}),
    ("qwen3", {}),
]


def prompts():
    """Three prompts, padded on the left."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, VOCAB, (3, 9), generator=draw)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[2, :7] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize(("name", "change"), CASES, ids=str)
def test_greedy_tokens(comm, name, change):
    plain, model = build(name, **change).eval(), build(name, **change).eval()
    report = slice_model(model, comm)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, found = (one.generate(**prompts(), **options, min_new_tokens=6) for one in (plain, model))
    assert torch.equal(found.sequences, expected.sequences)
    worst = max((a - b).abs().max().item() for a, b in zip(found.logits, expected.logits, strict=True))
    assert worst <= BOUND
    blocks = [path for path in report.whole if ".layers." in path or ".h." in path]
    assert not blocks
    assert report.local_elements < report.elements
