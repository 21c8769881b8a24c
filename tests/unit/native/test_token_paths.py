"""Tokens that pass a layer and tokens that do not: one gradient of both, beside autograd of gather and where."""

from functools import partial

import pytest
import torch

from mpispeed.native import status
from mpispeed.native.token_drop import gather, gather_reference, merge_reference, put, scatter, take

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make(batch, tokens, picked, width, dtype, batch_first, *, offset=0, seed=0):
    source = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(tokens, generator=source)[:picked].sort().values for _ in range(batch)]).int()
    shape = (batch, tokens, width) if batch_first else (tokens, batch, width)
    count = batch * tokens * width
    x = torch.randn(count + offset, generator=source).to(dtype)[offset:].view(shape)
    return x.requires_grad_(), index, torch.randn(shape, generator=source).to(dtype)


def by_where(x, index, layer, batch_first):
    """The layer for picked tokens, identity for the others, in gather, scatter and where."""
    dim, places = (1, index) if batch_first else (0, index.t())
    places = places.long()[:, :, None].expand(-1, -1, x.shape[2])
    y = layer(x.gather(dim, places))
    is_picked = torch.zeros_like(x, dtype=torch.bool).scatter(dim, places, True)
    return torch.where(is_picked, torch.zeros_like(x).scatter(dim, places, y), x)


def by_us(x, index, layer, batch_first):
    taken, rest = take(x, index, batch_first=batch_first)
    return put(layer(taken), index, rest, batch_first=batch_first)


def gated(weight, y):
    return weight * torch.tanh(y) + y


@pytest.mark.parametrize("has_loops", [True, False], ids=["loops", "torch"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["BSH", "SBH"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_have_the_bits_of_where(dtype, batch_first, has_loops, monkeypatch):
    if not has_loops:
        monkeypatch.setattr(status, "compiled", lambda name: None)
    for i, sizes in enumerate([(1, 1, 1, 1), (2, 9, 4, 3), (3, 70, 33, 64), (2, 5, 5, 130), (4, 700, 300, 256)]):
        x, index, slope = make(*sizes, dtype, batch_first, offset=i % 2)
        weight = torch.tensor(1.25, dtype=dtype, requires_grad=True)
        found = []
        for path in (by_where, by_us):
            out = path(x, index, partial(gated, weight), batch_first)
            found.append((out, *torch.autograd.grad(out, [x, weight], slope)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_of_float64_by_differences():
    x, index, _ = make(2, 5, 3, 2, torch.float64, True)
    assert torch.autograd.gradcheck(lambda x: by_us(x, index, lambda y: torch.tanh(y) * y, True), (x,))
    assert torch.autograd.gradgradcheck(lambda x: by_us(x, index, lambda y: torch.tanh(y) * y, True), (x,))


def test_a_layer_without_gradient_and_an_input_without():
    x, index, slope = make(2, 5, 3, 2, torch.float32, True)
    for layer in (torch.Tensor.detach, lambda y: y * 2):
        ours, wanted = (torch.autograd.grad(path(x, index, layer, True), x, slope) for path in (by_us, by_where))
        assert torch.equal(ours[0], wanted[0])
    weight = torch.ones((), requires_grad=True)
    by_us(x.detach(), index, lambda y: y * weight, True).sum().backward()
    assert torch.equal(weight.grad, gather(x.detach(), index).sum())


def test_dtypes_are_joined():
    x, index, _ = make(2, 5, 3, 2, torch.float32, True)
    out = by_us(x, index, torch.Tensor.bfloat16, True)
    out.sum().backward()
    assert out.dtype == torch.float32 and x.grad.dtype == torch.float32
    assert by_us(x.detach().bfloat16(), index, torch.Tensor.float, True).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.complex64], ids=str)
def test_the_loops_copy_rows_of_any_dtype(dtype):
    assert status.found("permute") is not None
    x, index, _ = make(3, 40, 11, 33, torch.float32, True)
    x = (x.detach() * 3).to(dtype)
    y = gather(x, index)
    assert torch.equal(y, gather_reference(x, index, True))
    assert torch.equal(scatter(y.flip(0), index, x), merge_reference(y.flip(0), x, index, 40, True))
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(gather(turned, index), y)
    assert torch.equal(gather(x, index.t().contiguous().t()), y)


def test_places_are_checked_on_the_host():
    x, _, _ = make(2, 5, 3, 2, torch.float32, True)
    for places, words in ([[0, 5]], "place 5"), ([[-1, 2]], "place -1"), ([[3, 3]], "place 3 of sample 0 twice"):
        with pytest.raises(ValueError, match=words):
            take(x[:1], torch.tensor(places))
    taken, rest = take(x, torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match=r"put: y has shape \(1, 2, 2\)"):
        put(taken[:1], torch.tensor([[0, 1], [1, 2]]), rest)
