"""Softmax kernels on the device: against float64 and their references, on odd shapes, slices and streams."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import softmax
from mpispeed.native.attention import attention
from mpispeed.native.cuda import philox
from mpispeed.native.softmax import causal_softmax, masked_softmax

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLUMNS = [1, 3, 8, 31, 33, 64, 128, 199, 256, 384, 509, 512, 1000, 2048, 4097, 8192, 9000, 16384]
SEED = torch.tensor(1 << 61 | 12345)


def bound(dtype, columns):
    """Of a probability: half a unit of storage, fp32 sums of `columns` terms, and the fast exponential."""
    return torch.finfo(dtype).eps + (16 + 4 * columns**0.5) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_backward_are_within_rounding_of_float64(device, dtype, columns, is_causal):
    torch.manual_seed(columns)
    x = (3 * torch.randn(2, 3, 37, columns, device=device)).to(dtype)
    hidden = torch.rand(2, 1, 1, columns, generator=torch.Generator().manual_seed(columns)) < 0.3
    hidden[..., 0] = False  # scores of a row in which all are hidden lose their digits to the mask
    mask = torch.where(hidden, -10000.0, 0.0).to(device, dtype)
    for ratio in (0.0, 0.2):
        got, probs = softmax.run_softmax(x, mask, SEED, 0.7, is_causal, ratio)
        probs = probs if ratio else got
        want, wide = softmax.softmax_reference(x.double(), mask.double(), SEED, 0.7, is_causal, ratio)
        wide = wide if ratio else want
        assert (probs.double() - wide).abs().max() <= bound(dtype, columns)
        assert torch.equal(got, softmax.run_dropout(probs, SEED, ratio)) if ratio else True
        grad = torch.randn(x.shape, device=device).to(dtype)
        dx = softmax.run_softmax_backward(grad, probs, SEED, 0.7, is_causal, ratio)
        want = softmax.softmax_backward_reference(grad.double(), probs.double(), SEED, 0.7, is_causal, ratio)
        assert (dx.double() - want).abs().max() <= bound(dtype, columns) * grad.abs().max().double() / (1 - ratio)


@pytest.mark.parametrize("columns", [7, 128, 384, 2048, 9001])
def test_dropout_keeps_what_the_twin_keeps(device, columns):
    x = torch.randn(4, 5, columns, device=device)
    got, probs = softmax.run_softmax(x, None, SEED, 1.0, False, 0.3)
    kept = philox.kept(int(SEED), x.numel(), 0.3, device).view(x.shape)
    assert torch.equal(got != 0, kept & (probs != 0))
    assert torch.equal(got, softmax.dropout_reference(probs, SEED, 0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_that_begin_anywhere_give_the_same(device, dtype):
    flat = torch.randn(4 * 16 * 128 + 1, device=device).to(dtype)
    x, mask = flat[1:].view(4, 16, 128), torch.randn(129, device=device).to(dtype)[1:]
    torch.testing.assert_close(masked_softmax(x, mask), masked_softmax(x.clone(), mask.clone()))


def test_masked_rows_and_the_upper_triangle(device):
    x = torch.randn(2, 2, 64, 64, device=device)
    assert not masked_softmax(x, torch.zeros(64, dtype=torch.bool, device=device)).any()
    upper = torch.ones(64, 64, dtype=torch.bool, device=device).triu(1)
    dirty = causal_softmax(x.masked_fill(upper, torch.nan))
    assert torch.equal(dirty, causal_softmax(x))
    assert not dirty[..., upper].any()


def test_more_than_two_to_the_31_elements(device):
    rows = 2**31 // 1024 + 3
    x = torch.zeros(rows, 1024, dtype=torch.float16, device=device)
    x[-1, 5] = 3.0
    out = masked_softmax(x, ratio=0.0)
    torch.testing.assert_close(out[-1].float(), torch.softmax(x[-1].float(), -1), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(out[0].float(), torch.softmax(x[0].float(), -1), rtol=1e-3, atol=1e-6)


def test_a_side_stream_keeps_the_order(device):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = torch.randn(64, 64, 512, device=device)
        for _ in range(20):
            x = masked_softmax(x * 2.0)
        want = x * 1.0
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(want.sum(-1), torch.full((64, 64), 1.0, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keeps", [True, False])
def test_attention_is_that_of_float64(device, dtype, keeps):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 119, 64, device=device).to(dtype).requires_grad_() for _ in range(3))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(2, 4, 119, 64, device=device)
    out = attention(q, k, v, ratio=0.1, seed=SEED, keeps_dropped=keeps)
    want = attention(*wide, ratio=0.1, seed=SEED)
    got = [out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype))]
    # Scores, probabilities and their gradients are stored in 16 bits: a few roundings of the largest number each.
    # TF32 is off by default, so fp32 products are whole.
    share = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for a, b in zip(got, [want, *torch.autograd.grad(want, wide, grad.double())], strict=True):
        assert (a.double() - b).abs().max() <= share * b.abs().max()
