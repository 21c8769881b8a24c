"""Attention in pieces equals attention with a mask of all pairs; the kernels equal plain torch."""

from __future__ import annotations

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.nn.attention import Piece, attend, kernels, merge, partial, partial_backward, pieces_of, run, run_backward
from mpispeed.nn.attention.core import begin
from tests.helpers.dense_attention import BOUNDS, attention, bias_of, compare, inputs

DTYPES = list(BOUNDS)
CUTS = [
    ([(0, 37)], [(0, 37)], False, None),
    ([(0, 37)], [(0, 37)], True, None),
    ([(3, 9), (20, 41)], [(0, 12), (25, 45)], True, None),
    ([(0, 37)], [(0, 37)], True, [[(0, 10), (10, 37)], [(0, 4), (9, 30)]]),
    ([(0, 20)], [(0, 37)], False, [[(0, 37)], []]),
]


def allowed(queries, keys, causal, spans) -> torch.Tensor:
    """[2 rows, 1, queries, keys]."""
    query, key = (torch.cat([torch.arange(*part) for part in parts]) for parts in (queries, keys))
    rows = []
    for row in spans or [[(0, 100)], [(0, 100)]]:
        document = torch.full((100,), -1)
        for number, (start, stop) in enumerate(row):
            document[start:stop] = number
        pairs = (document[query].unsqueeze(1) == document[key]) & (document[key] >= 0)
        rows.append(pairs & (key <= query.unsqueeze(1)) if causal else pairs)
    return torch.stack(rows).unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_keys", [4, 2, 1])
@pytest.mark.parametrize("cut", CUTS)
def test_output_and_gradients_equal_those_with_a_mask(cut, of_keys, dtype):
    queries, keys, causal, spans = cut
    pairs = allowed(queries, keys, causal, spans)
    q, k, v, grad = inputs(2, 4, of_keys, tuple(pairs.shape[2:]), 8, dtype)
    out = attend(q, k, v, pieces_of(queries, keys, causal=causal, spans=spans), scale=0.4)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    compare(found, attention(q, k, v, grad, bias_of(pairs), 0.4), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_kernel_of_the_cpu_equals_its_twin(dtype, is_masked):
    q, k, v, grad = (x.detach() for x in inputs(2, 4, 2, (33, 33), 16, dtype))
    mask = None
    if is_masked:
        mask = torch.randn(2, 1, 33, 33, generator=torch.Generator().manual_seed(0), dtype=kernels.wide(dtype))
        mask[:, :, 5], mask[:, :, 7, :30] = -torch.inf, -torch.inf
    out, lse = partial(q, k, v, is_causal=not is_masked, scale=0.3, mask=mask)
    twin, twin_lse = kernels._math(q, k, v, not is_masked, 0.3, mask)
    assert lse.dtype == kernels.wide(dtype)
    torch.testing.assert_close(out, twin, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    torch.testing.assert_close(lse, twin_lse, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    if is_masked:
        assert (out[:, :, 5] == 0).all() and (lse[:, :, 5] == -torch.inf).all()
    found = partial_backward(grad, q, k, v, out, lse, is_causal=not is_masked, scale=0.3, mask=mask)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    expected = kernels._math_backward(grad, q, k, v, out, finite, not is_masked, 0.3, mask)
    torch.testing.assert_close(found, expected, rtol=4 * BOUNDS[dtype], atol=4 * BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_come_in_parts_give_what_all_at_once_give(dtype):
    q, k, v, grad = (x.detach() for x in inputs(2, 4, 2, (20, 50), 8, dtype))
    expected = attention(q, k, v, grad, torch.zeros(20, 50))
    sums = begin(q)
    sums_of_q = torch.zeros(q.shape, dtype=kernels.wide(dtype))
    parts = [slice(0, 17), slice(17, 18), slice(18, 50)]
    for part in parts:
        run(q, k[:, :, part], v[:, :, part], [Piece((0, 20), (0, part.stop - part.start))], into=sums)
    out, gathered = sums[0].to(dtype), []
    for part in parts:
        own = [torch.zeros(k[:, :, part].shape, dtype=kernels.wide(dtype)) for _ in "kv"]
        pieces = [Piece((0, 20), (0, part.stop - part.start))]
        run_backward(grad, q, k[:, :, part], v[:, :, part], out, sums[1], pieces, into=(sums_of_q, *own))
        gathered.append(own)
    of_k, of_v = (torch.cat(each, 2).to(dtype) for each in zip(*gathered, strict=True))
    compare([out, sums_of_q.to(dtype), of_k, of_v], expected, dtype)


def test_merging_nothing_changes_no_bit_and_merging_into_nothing_takes_all():
    q, k, v, _ = (x.detach() for x in inputs(1, 2, 2, (5, 9), 8, torch.float32))
    out, lse = partial(q, k, v)
    kept, nothing = (out.clone(), lse.clone()), begin(q)
    merge(*kept, *begin(q))
    merge(*nothing, out, lse)
    assert torch.equal(kept[0], out) and torch.equal(kept[1], lse)
    assert torch.equal(nothing[0], out) and torch.equal(nothing[1], lse)


def test_queries_without_keys_are_zeros_and_empty_tensors_stay_empty():
    q, k, v, grad = inputs(1, 2, 2, (6, 5), 8, torch.float32)
    out = attend(q, k, v, [Piece((1, 3), (0, 5))])
    assert (out[:, :, [0, 3, 4, 5]] == 0).all() and (out[:, :, 1:3] != 0).all()
    found = torch.autograd.grad(out, (q, k, v), grad)
    assert all(x.isfinite().all() for x in found) and (found[0][:, :, 3:] == 0).all()
    assert attend(q[:, :, :0], k, v, [Piece((0, 0), (0, 5))]).shape == (1, 2, 0, 8)
    assert (attend(q, k[:, :, :0], v[:, :, :0], [Piece((0, 6), (0, 0))]) == 0).all()


def test_strides_of_any_kind_change_no_bit():
    q, k, v, _ = (x.detach() for x in inputs(2, 4, 4, (12, 12), 8, torch.float32))
    whole = [Piece((0, 12), (0, 12), is_causal=True)]
    for change in (lambda x: x.mT.contiguous().mT, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        same = [change(x).requires_grad_() for x in (q, k, v)]
        plain = [x.clone().requires_grad_() for x in (q, k, v)]
        found, expected = attend(*same, whole), attend(*plain, whole)
        assert torch.equal(found, expected)
        # the gradient of a sum is one number, expanded
        pairs = zip(torch.autograd.grad(found.sum(), same), torch.autograd.grad(expected.sum(), plain), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_autocast_gives_attention_its_dtype_as_it_does_to_that_of_torch():
    q, k, v, _ = (x.detach() for x in inputs(1, 2, 2, (6, 6), 8, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k.bfloat16(), v, [Piece((0, 6), (0, 6))])
        expected = torch.nn.functional.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=BOUNDS[out.dtype], atol=BOUNDS[out.dtype])


def test_meta_tensors_have_shapes_without_values():
    q, k, v, _ = (x.detach().to("meta").requires_grad_() for x in inputs(1, 4, 2, (6, 6), 8, torch.float32))
    out = attend(q, k, v, [Piece((0, 3), (0, 3), is_causal=True), Piece((3, 6), (0, 6))])
    out.sum().backward()
    assert out.shape == q.shape and k.grad is not None and k.grad.shape == k.shape


@pytest.mark.parametrize(
    ("shapes", "piece", "message"),
    [
        (((1, 4, 6, 8), (1, 4, 6, 4)), Piece((0, 6), (0, 6)), r"with one B and d, not q \(1, 4, 6, 8\)"),
        (((1, 4, 6, 8), (1, 3, 6, 8)), Piece((0, 6), (0, 6)), "a multiple of the heads of k and v"),
        (((1, 4, 6, 8), (1, 4, 6, 8)), Piece((0, 7), (0, 6)), "names tokens or rows that are not there"),
        (((1, 4, 6, 8), (1, 4, 6, 8)), Piece((0, 6), (0, 6), False, 1), "names tokens or rows that are not there"),
        (((1, 4, 6, 8), (1, 4, 6, 8)), Piece((0, 6), (0, 5), True), "is causal and no square"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, piece, message):
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(UsageError, match=message):
        attend(q, k, k, [piece])


def test_dtypes_that_differ_are_refused():
    q = torch.zeros(1, 2, 6, 8)
    with pytest.raises(UsageError, match=r"of one floating dtype.*cast them to one"):
        attend(q, q.bfloat16(), q.bfloat16(), [Piece((0, 6), (0, 6))])
