"""Buffers that no weight file has are made again."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.inference.buffers import remake_buffers
from tests.helpers.hub_models import build, builders


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neo", "bert", "gemma"])
def test_values_of_a_new_model(name):
    with torch.device("meta"):
        model = builders()[name]()
    names = remake_buffers(model)
    plain = dict(build(name).named_buffers())
    assert names
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, plain[key]), key
    assert all(param.is_meta for param in model.parameters())


def test_buffers_with_values_and_dtypes_stay():
    with torch.device("meta"):
        model = builders()["llama"]().to(torch.bfloat16)
    model.model.rotary_emb.inv_freq = torch.ones(3)
    assert remake_buffers(model) == ["model.rotary_emb.original_inv_freq"]
    assert model.model.rotary_emb.inv_freq.sum() == 3
    assert model.model.rotary_emb.original_inv_freq.dtype == torch.bfloat16


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(3), persistent=False)


def test_a_buffer_that_nobody_computes():
    with torch.device("meta"):
        model = nn.Sequential(Masked())
    with pytest.raises(ConfigError, match=r"the buffer mask of 0 \(Masked\) has no values"):
        remake_buffers(model)
