"""Tokens picked and put back on a GPU, beside the references on the host."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import token_drop
from mpispeed.native.token_drop import gather, scatter

SHAPES = [
    (1, 1, 1, 1),
    (2, 9, 4, 3),
    (3, 70, 33, 8),
    (2, 500, 256, 1030),
    (1, 3, 2, 1031),
    (2, 4, 0, 8),
    (8, 512, 384, 768),
]


def make_index(batch, tokens, picked, dtype, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(tokens, generator=source)[:picked] for _ in range(batch)]).to(dtype)


def make_tokens(batch, tokens, width, dtype, batch_first, seed):
    x = torch.randn(batch * tokens * width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.view(batch, tokens, width) if batch_first else x.view(tokens, batch, width)


@pytest.mark.parametrize("batch_first", [True, False], ids=["BSH", "SBH"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_values_are_those_of_the_host(device, dtype, index_dtype, batch_first):
    for i, (batch, tokens, picked, width) in enumerate(SHAPES):
        index = make_index(batch, tokens, picked, index_dtype)
        x, y, into = (
            make_tokens(batch, n, width, dtype, batch_first, seed) for seed, n in enumerate((tokens, picked, tokens))
        )
        there = [torch.cat([t.reshape(-1)[: i % 2], t.reshape(-1)]).to(device) for t in (x, y, into)]
        moved = [t[min(i % 2, s.numel()) :].view(s.shape) for t, s in zip(there, (x, y, into), strict=True)]
        ours = gather(moved[0], index.to(device), batch_first=batch_first)
        assert torch.equal(ours.cpu(), gather(x, index, batch_first=batch_first))
        ours = scatter(moved[1], index.to(device), moved[2], batch_first=batch_first)
        assert torch.equal(ours.cpu(), scatter(y, index, into, batch_first=batch_first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_host(device, dtype):
    index = make_index(4, 128, 50, torch.int64)
    found = []
    for place in ("cpu", device):
        x, y, weight, other = (
            make_tokens(4, n, 96, dtype, True, seed).to(place) for seed, n in enumerate((128, 50, 128, 50))
        )
        x.requires_grad_(), y.requires_grad_()
        outputs = [gather(x, index.to(place)), scatter(y, index.to(place), x)]
        found.append(torch.autograd.grad(outputs, [x, y], [other, weight]))
    for host, ours in zip(*found, strict=True):
        assert torch.equal(ours.cpu(), host)


def test_wrong_places_touch_no_memory_of_others(device, monkeypatch):
    x, y = torch.randn(2, 5, 64, device=device), torch.randn(2, 2, 64, device=device)
    index = torch.tensor([[0, 5], [-1, 1 << 40]], device=device)
    picked, merged = torch.zeros_like(y), x.clone()
    picked[0, 0], merged[0, 0] = x[0, 0], y[0, 0]
    assert torch.equal(gather(x, index), picked)
    assert torch.equal(scatter(y, index, x), merged)
    monkeypatch.setenv(token_drop.CHECK_VARIABLE, "1")
    with pytest.raises(ValueError, match="names place -1 of a sample with 5 tokens"):
        gather(x, index)


def test_operators_are_what_torch_expects(device):
    x, y = (torch.randn(2, n, 8, device=device, requires_grad=True) for n in (5, 2))
    index = make_index(2, 5, 2, torch.int64).to(device)
    torch.library.opcheck(torch.ops.mpispeed.token_gather.default, (x, index, True))
    torch.library.opcheck(torch.ops.mpispeed.token_merge.default, (y, x, index, 5, True))


def test_autocast_joins_dtypes(device):
    x, index = torch.randn(2, 5, 3, device=device), make_index(2, 5, 2, torch.int64).to(device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert scatter(gather(x, index).bfloat16(), index, x).dtype == torch.float32
