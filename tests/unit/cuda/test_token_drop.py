"""Gather and scatter of tokens: the kernels, run on the host, beside their references and plain indexing; gradients."""

from __future__ import annotations

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.native import token_drop
from mpispeed.native.cuda import launcher
from mpispeed.native.token_drop import gather, scatter
from tests.helpers.cuda_host import HostLauncher

# batch, tokens, picked, width: rows of less than a unit, of one, of many; more rows than threads
SHAPES = [(1, 1, 1, 1), (2, 9, 4, 3), (3, 70, 33, 8), (2, 5, 5, 130), (1, 3, 2, 1031), (2, 4, 0, 8), (2, 300, 150, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64]


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def kernels(request):
    return HostLauncher(is_reversed=request.param)


def make_index(batch, tokens, picked, dtype=torch.int64, *, is_sorted=True, seed=0):
    source = torch.Generator().manual_seed(seed)
    places = [torch.randperm(tokens, generator=source)[:picked] for _ in range(batch)]
    return torch.stack([x.sort().values if is_sorted else x for x in places]).to(dtype)


def make_tokens(batch, tokens, width, dtype, *, batch_first=True, seed=0):
    x = torch.randn(batch * tokens * width, generator=torch.Generator().manual_seed(seed)) * 50
    return x.to(dtype).view(batch, tokens, width) if batch_first else x.to(dtype).view(tokens, batch, width)


def unaligned(x):
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


def picked_plainly(x, index, batch_first):
    rows = x if batch_first else x.transpose(0, 1)
    found = torch.stack([sample[places.long()] for sample, places in zip(rows, index, strict=True)])
    return found if batch_first else found.transpose(0, 1)


def put_plainly(y, index, into, batch_first):
    out = into.clone()
    rows, new = (out, y) if batch_first else (out.transpose(0, 1), y.transpose(0, 1))
    for sample, places in enumerate(index):
        rows[sample, places.long()] = new[sample]
    return out


@pytest.mark.parametrize("batch_first", [True, False], ids=["BSH", "SBH"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_twins_and_plain_indexing_agree(kernels, dtype, index_dtype, batch_first):
    for i, (batch, tokens, picked, width) in enumerate(SHAPES):
        index = make_index(batch, tokens, picked, index_dtype, is_sorted=i % 2 == 0)
        x, y, into = (
            make_tokens(batch, count, width, dtype, batch_first=batch_first, seed=seed)
            for seed, count in enumerate((tokens, picked, tokens))
        )
        if i % 2:
            x, y, into = map(unaligned, (x, y, into))
        before = len(kernels.launched)
        with launcher.standing_in(kernels):
            ours = gather(x, index, batch_first=batch_first), scatter(y, index, into, batch_first=batch_first)
        references = gather(x, index, batch_first=batch_first), scatter(y, index, into, batch_first=batch_first)
        assert len(kernels.launched) == before + (3 if picked else 1)
        wanted = picked_plainly(x, index, batch_first), put_plainly(y, index, into, batch_first)
        for found in (ours, references):
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1], wanted[1])
            assert all(out.is_contiguous() for out in found)


@pytest.mark.parametrize(
    ("width", "dtype", "unit"),
    [
        (8, torch.bfloat16, 16),
        (4, torch.bfloat16, 8),
        (6, torch.bfloat16, 4),
        (3, torch.bfloat16, 2),
        (3, torch.int8, 1),
    ],
)
def test_rows_are_copied_in_the_widest_unit_that_fits(width, dtype, unit):
    kernels, x, index = HostLauncher(), make_tokens(2, 6, width, dtype), make_index(2, 6, 3)
    with launcher.standing_in(kernels):
        scatter(gather(x, index), index, x)
    assert kernels.launched == [f"token_gather_{unit}_i64", "token_sources_i64", f"token_merge_{unit}"]


def test_more_dims_than_one_and_strides_of_any_kind(kernels):
    x, index = torch.randn(4, 2, 6, 3).transpose(0, 2), make_index(6, 2, 1)
    with launcher.standing_in(kernels):
        ours = gather(x, index), scatter(gather(x, index), index.flip(1), x * 2)
    assert torch.equal(ours[0], picked_plainly(x, index, True))
    assert torch.equal(ours[1], put_plainly(ours[0], index, x * 2, True))


@pytest.mark.parametrize("batch_first", [True, False], ids=["BSH", "SBH"])
@pytest.mark.parametrize("is_twin", [True, False], ids=["twin", "kernels"])
def test_gradients_are_those_of_plain_indexing(is_twin, batch_first):
    index = make_index(2, 9, 4, is_sorted=False)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (make_tokens(2, n, 5, dtype, batch_first=batch_first, seed=n).requires_grad_() for n in (9, 4))
        weight, other = (make_tokens(2, n, 5, dtype, batch_first=batch_first, seed=n) for n in (90, 40))
        weight, other = weight.narrow(1 if batch_first else 0, 0, 9), other.narrow(1 if batch_first else 0, 0, 4)
        with launcher.standing_in(None if is_twin else HostLauncher()):
            picked, merged = gather(x, index, batch_first=batch_first), scatter(y, index, x, batch_first=batch_first)
            ours = torch.autograd.grad([picked, merged], [x, y], [other, weight])
        plain = [picked_plainly(x, index, batch_first), put_plainly(y, index, x, batch_first)]
        wanted = torch.autograd.grad(plain, [x, y], [other, weight])
        assert torch.equal(ours[0], wanted[0])
        assert torch.equal(ours[1], wanted[1])


def test_gradients_of_float64_by_differences():
    index = make_index(2, 5, 3)
    x, y = (torch.randn(2, n, 2, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    assert torch.autograd.gradcheck(lambda x: gather(x, index), (x,))
    assert torch.autograd.gradcheck(lambda x, y: scatter(y, index, x), (x, y))


def test_one_of_the_two_may_need_no_gradient():
    index, x, y = make_index(2, 5, 3), torch.randn(2, 5, 2), torch.randn(2, 3, 2, requires_grad=True)
    scatter(y, index, x).sum().backward()
    assert torch.equal(y.grad, torch.ones(2, 3, 2))
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(scatter(y, index, x).square().sum(), y, create_graph=True)


def test_operators_are_what_torch_expects():
    x, y, index = (
        torch.randn(2, 5, 3, requires_grad=True),
        torch.randn(2, 2, 3, requires_grad=True),
        make_index(2, 5, 2),
    )
    torch.library.opcheck(torch.ops.mpispeed.token_gather.default, (x, index, True))
    torch.library.opcheck(torch.ops.mpispeed.token_merge.default, (y, x, index, 5, True))
    torch.library.opcheck(torch.ops.mpispeed.token_merge.default, (y, None, index, 5, True))


def test_compiled_in_one_graph():
    x, index = torch.randn(2, 5, 3), make_index(2, 5, 2)

    def layer(x):
        return scatter(gather(x, index) * 2, index, x)

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_autocast_joins_dtypes():
    x, index = torch.randn(2, 5, 3), make_index(2, 5, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = scatter(gather(x, index).bfloat16(), index, x)
    assert out.dtype == torch.float32
    with pytest.raises(ValueError, match=r"y has dtype torch.bfloat16 and into torch.float32; convert one"):
        scatter(gather(x, index).bfloat16(), index, x)


def test_wrong_places_are_refused_on_the_host_and_harmless_in_kernels(monkeypatch):
    x, y = torch.randn(2, 5, 3), torch.randn(2, 2, 3)
    for places, words in (
        ([[0, 5], [0, 1]], "names place 5 of a sample with 5 tokens; places are 0 to 4"),
        ([[0, 1], [-1, 1]], "names place -1 of"),
        ([[0, 1], [3, 3]], "names place 3 of sample 1 twice"),
    ):
        with pytest.raises(ValueError, match=words):
            gather(x, torch.tensor(places))
        with pytest.raises(ValueError, match=words):
            scatter(y, torch.tensor(places), x)
    # what a device does, which does not look
    monkeypatch.setattr(token_drop, "_check_places", lambda *_: None)
    index = torch.tensor([[0, 5], [-1, 1 << 40]])
    picked, merged = torch.zeros(2, 2, 3), x.clone()
    picked[0, 0], merged[0, 0] = x[0, 0], y[0, 0]
    with launcher.standing_in(HostLauncher()):
        assert torch.equal(gather(x, index), picked)
        assert torch.equal(scatter(y, index, x), merged)


def test_what_does_not_fit_is_refused():
    x, y, index = torch.randn(2, 5, 3), torch.randn(2, 2, 3), make_index(2, 5, 2)
    with pytest.raises(ValueError, match=r"gather: index has shape \(3, 2\) for tokens \(2, 5, 3\); expected \[2, K\]"):
        gather(x, make_index(3, 5, 2))
    with pytest.raises(ValueError, match=r"expected \[5, K\]"):
        gather(x, index, batch_first=False)
    with pytest.raises(ValueError, match=r"index has dtype torch.float32; use int32 or int64"):
        gather(x, index.float())
    with pytest.raises(ValueError, match=r"tokens have shape \(5,\); expected \[B, S, ...\]"):
        gather(x[0, :, 0], index)
    with pytest.raises(ValueError, match=r"scatter: y has shape \(2, 1, 3\) on cpu; index and into need \(2, 2, 3\)"):
        scatter(y[:, :1], index, x)
    with pytest.raises(ValueError, match=r"index is on meta and tokens are on cpu; put both on one device"):
        gather(x, index.to("meta"))
