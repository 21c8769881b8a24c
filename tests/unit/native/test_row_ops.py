"""Permute and combine with gradients: equal to a loop over tokens, and whole as operators of torch."""

from __future__ import annotations

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.native.permute import combine_rows
from mpispeed.native.row_ops import combine, permute
from tests.zoo import has_same_bits

TOKENS, CHOICES, WIDTH, ROWS = 12, 3, 20, 40


def numbers(dtype=torch.float64):
    source = torch.Generator().manual_seed(4)
    x = torch.randn(TOKENS, WIDTH, generator=source, dtype=torch.float64).to(dtype)
    index = torch.randperm(ROWS, generator=source)[: TOKENS * CHOICES].view(TOKENS, CHOICES)
    index[2, 1] = index[3, 0] = -1
    index[5] = -1
    weights = torch.rand(TOKENS, CHOICES, generator=source, dtype=torch.float64)
    return x.requires_grad_(), index, weights.requires_grad_()


def mixed(x, index, weights):
    """A token through the rows of its choices, each scaled by itself, in plain torch."""
    scales = torch.linspace(0.5, 2.0, ROWS, dtype=x.dtype)
    out = [
        sum((weights[t, j] * scales[row] * x[t] for j, row in enumerate(index[t].tolist()) if row >= 0), 0 * x[t])
        for t in range(TOKENS)
    ]
    return torch.stack(out)


def ours(x, index, weights):
    scales = torch.linspace(0.5, 2.0, ROWS, dtype=x.dtype).unsqueeze(1)
    return combine(permute(x, index, ROWS) * scales, index, weights)


def test_gradients_are_those_of_a_loop_over_tokens():
    x, index, weights = numbers()
    target = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    results = []
    for forward in (mixed, ours):
        out = forward(x, index, weights)
        results.append((out, *torch.autograd.grad((out * target).sum(), (x, weights))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # sums of 60 terms in fp64
    assert not results[1][1][5].any()  # a token whose choices were all dropped


def test_gradients_are_numerical_ones():
    x, index, weights = numbers()
    assert torch.autograd.gradcheck(lambda x: permute(x, index, ROWS), (x,))
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows, weights: combine(rows, index, weights), (rows, weights))
    assert torch.autograd.gradcheck(lambda rows: combine(rows, index), (rows,))


def test_a_penalty_on_gradients_is_refused():
    _, index, weights = numbers()
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(combine(rows, index, weights).sum(), (rows, weights), create_graph=True)
    (grad,) = torch.autograd.grad(combine(rows, index, weights.detach()).sum(), rows, create_graph=True)
    assert not grad.requires_grad  # linear in the rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_tokens_are_sums_rounded_once(dtype):
    x, index, _ = numbers()
    x = x.detach().to(dtype).requires_grad_()
    grad = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6)).to(dtype)
    permute(x, index, ROWS).backward(grad)
    expected = torch.empty_like(x)
    combine_rows(expected, grad, index)
    assert has_same_bits(x.grad, expected)


def test_weights_get_gradients_in_their_dtype_and_only_where_wanted():
    x, index, weights = numbers(torch.bfloat16)
    rows = permute(x.detach(), index, ROWS)
    for dtype in (torch.bfloat16, torch.float64):
        own = weights.detach().to(dtype).requires_grad_()
        out = combine(rows, index, own)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()  # an expanded gradient
        kept = index >= 0
        expected = rows[index.clamp(min=0)].double().sum(2) * kept
        torch.testing.assert_close(own.grad.double(), expected, rtol=2**-8, atol=1e-6)  # rounded to bf16 once
    with torch.no_grad():
        assert not combine(rows, index, weights).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_whole(dtype):
    x, index, weights = numbers(dtype)
    weights = weights.detach().float().requires_grad_()
    rows = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    found = torch.ops.mpispeed
    torch.library.opcheck(found.row_spread.default, (x, index, None, ROWS))
    torch.library.opcheck(found.row_combine.default, (rows, index, weights))
    torch.library.opcheck(found.row_combine.default, (rows, index, None))
    torch.library.opcheck(found.row_dot.default, (x.detach(), rows.detach(), index))


def test_two_choices_for_one_row_are_refused():
    x, index, weights = numbers()
    index[0, 0] = index[1, 0]
    with pytest.raises(ValueError, match="a row of out belongs to one choice"):
        permute(x, index, ROWS)
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    out = combine(rows, index, weights)
    with pytest.raises(ValueError, match="a row of out belongs to one choice"):
        out.sum().backward()
