"""Random-LTD on a GPU: the places of the host, and its values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from mpispeed.native.token_choice import choose, key_of
from mpispeed.native.token_drop import put, take
from tests.helpers.pipes import gpt
from tests.helpers.token_dropping import batches, drop_tokens, dropping, steady

HOST = torch.device("cpu")


@pytest.mark.parametrize(("batch", "tokens", "count"), [(1, 1, 1), (3, 70, 33), (2, 5, 0), (4, 2048, 1000)])
def test_places_are_those_of_the_host(device, batch, tokens, count):
    key = key_of(1, 2, batch)
    there = choose(key, 5, batch, tokens, count, torch.device(device))
    assert there.device.type == "cuda" and there.dtype == torch.int32
    assert torch.equal(there.cpu(), choose(key, 5, batch, tokens, count, HOST))


@pytest.mark.parametrize("batch_first", [True, False], ids=["BSH", "SBH"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_take_and_put_have_the_bits_of_the_host(device, dtype, batch_first):
    index, found = choose(3, 0, 4, 128, 50, HOST), []
    shape = (4, 128, 96) if batch_first else (128, 4, 96)
    source = torch.Generator().manual_seed(0)
    x, slope = (torch.randn(shape, generator=source).to(dtype) for _ in range(2))
    for place in ("cpu", device):
        leaf = x.to(place).requires_grad_()
        taken, rest = take(leaf, index.to(place), batch_first=batch_first)
        out = put(taken * 2, index.to(place), rest, batch_first=batch_first)
        found.append((out, *torch.autograd.grad(out, leaf, slope.to(place))))
    assert all(torch.equal(ours.cpu(), host) for host, ours in zip(*found, strict=True))


def test_a_model_comes_near_the_host(device):
    host = steady()
    there = copy.deepcopy(host).to(device)
    x, y = batches(1)[0]
    for model, inputs in ((host, (x, y)), (there, (x.to(device), y.to(device)))):
        drop_tokens(model, gpt.Block, dropping())
        model(*inputs).backward()
    assert host(x, y).item() == pytest.approx(there(x.to(device), y.to(device)).item(), rel=1e-4)
    for ours, wanted in zip(there.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), wanted.grad, rtol=2e-3, atol=2e-5)
