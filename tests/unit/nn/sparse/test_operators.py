"""Products and softmax of sparse tensors equal those of dense ones, forward and backward."""

import itertools

import pytest
import torch

from mpispeed.nn.sparse import MatMul, Softmax

M, N, K = 64, 96, 48


def layout_of(rows, columns, block, heads=2):
    torch.manual_seed(1)
    layout = (torch.rand(heads, rows // block, columns // block) < 0.6).long()
    layout[0, 0] = 0  # a row without a block
    return layout


def sparse_of(dense, layout, block):
    heads, rows, columns = layout.nonzero(as_tuple=True)
    blocks = dense.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).transpose(-3, -2)
    return blocks[:, heads, rows, columns]


def whole(layout, block):
    return layout.repeat_interleave(block, 1).repeat_interleave(block, 2)


@pytest.mark.parametrize(
    ("mode", "trans_a", "trans_b"), list(itertools.product(["sdd", "dsd", "dds"], *[[False, True]] * 2))
)
def test_products_are_those_of_dense_matrices(mode, trans_a, trans_b):
    block = 16
    sizes = {"a": (K, M) if trans_a else (M, K), "b": (N, K) if trans_b else (K, N), "y": (M, N)}
    shape = sizes[{"s": "y"}.get(mode[0], "a" if mode[1] == "s" else "b")]
    layout = layout_of(*shape, block)
    torch.manual_seed(0)
    a, b = (torch.randn(3, 2, *sizes[name], dtype=torch.double, requires_grad=True) for name in "ab")
    mask = whole(layout, block)
    dense_a, dense_b = (a * mask if mode[1] == "s" else a), (b * mask if mode[2] == "s" else b)
    expected = (dense_a.mT if trans_a else dense_a) @ (dense_b.mT if trans_b else dense_b)
    given = [sparse_of(x, layout, block) if letter == "s" else x for x, letter in zip((a, b), mode[1:], strict=True)]
    found = MatMul(layout, block, mode, trans_a, trans_b)(*given)
    expected = sparse_of(expected, layout, block) if mode[0] == "s" else expected
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (a, b), grad)
    assert torch.allclose(found, expected, atol=1e-12)
    for have, want in zip(torch.autograd.grad(found, (a, b), grad), wanted, strict=True):
        assert torch.allclose(have, want, atol=1e-12)


def test_missing_dims_are_added_and_a_layout_may_be_for_all_heads():
    layout = layout_of(64, 64, 16, 1)[0]
    a, b = torch.randn(2, 2, 64, 32).unbind()
    found = MatMul(layout, 16, "sdd")(a, b.mT)
    assert torch.allclose(found, sparse_of((a @ b.mT)[None], layout.expand(2, -1, -1), 16)[0], atol=1e-5)
    assert MatMul(layout, 16, "dsd")(found[None], b[None]).shape == (1, 2, 64, 32)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float32, 5e-4, 5e-5), (torch.float16, 3e-2, 2e-3)])
@pytest.mark.parametrize("block", [16, 32])
def test_softmax_is_that_of_rows_with_minus_infinity_outside(dtype, rtol, atol, block):
    size = 192
    layout = layout_of(size, size, block)
    torch.manual_seed(0)
    x = torch.randn(2, 2, size, size).to(dtype).double().requires_grad_()
    padding = torch.zeros(2, size).masked_fill(torch.rand(2, size) < 0.2, -torch.inf)
    seen, rpe = (torch.rand(size, size) < 0.9).to(dtype), torch.randn(1, 2, size, size).to(dtype)
    hidden = whole(layout, block) * seen == 0
    scores = x * 0.4 + rpe.double() + padding[:, None, None].double()
    scores = scores.masked_fill(hidden, -torch.inf)
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    expected = sparse_of(scores.masked_fill(is_empty, 0).softmax(-1).masked_fill(is_empty, 0), layout, block)
    given = sparse_of(x.detach(), layout, block).to(dtype).requires_grad_()
    found = Softmax(layout, block)(given, 0.4, rpe, padding.to(dtype), seen, attn_mask_mode="mul")
    grad = torch.randn(found.shape).to(dtype)
    found.backward(grad)
    expected.backward(grad.double())
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol, atol)
    assert torch.allclose(given.grad.double(), sparse_of(x.grad, layout, block), rtol, atol)


def test_what_does_not_fit_is_said():
    layout = layout_of(64, 64, 16)
    a = torch.randn(1, 2, 64, 32)
    with pytest.raises(NotImplementedError, match="'ddd'"):
        MatMul(layout, 16, "ddd")
    for wrong, sentence in {
        (a, a.mT.half()): "give both alike",
        (a[None], a.mT): "at most 4",
        (a, a): "is not one of",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            MatMul(layout, 16, "sdd")(*wrong)
    with pytest.raises(ValueError, match="its last dims are"):
        MatMul(layout, 16, "dsd")(torch.randn(1, 3, 16, 16), a)
    with pytest.raises(ValueError, match="attn_mask is"):
        Softmax(layout, 16)(torch.randn(1, 3, 16, 16), attn_mask=torch.ones(64, 64).half())
