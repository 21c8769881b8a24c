"""Rows of experts: the kernels, run on the host, beside the references; what is not there, and what is empty."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import permute
from mpispeed.native.cuda import launcher
from mpispeed.native.permute import combine_rows, dot_rows, spread_rows
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import has_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# tokens, choices, width: less than a packet, one, some and a rest, more than a block walks at once
SHAPES = [(1, 1, 1), (3, 2, 8), (5, 3, 13), (70, 2, 136), (2, 6, 1031), (2, 2, 9000)]


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def kernels(request):
    return HostLauncher(is_reversed=request.param)


def normal(*shape, dtype=torch.float32, seed=0, is_aligned=True):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    room = torch.empty(values.numel() + 1, dtype=dtype)[0 if is_aligned else 1 :][: values.numel()]
    return room.copy_(values.view(-1)).view(shape)


def routes(tokens, choices, spare=2):
    source = torch.Generator().manual_seed(tokens)
    count = tokens * choices + spare
    index = torch.randperm(count, generator=source)[: tokens * choices].view(tokens, choices)
    return index.masked_fill(torch.rand(index.shape, generator=source) < 0.2, -1), count


def passes(x, rows, index, weights):
    outs = {
        "combine": torch.full_like(x, 7), "combine_plain": torch.full_like(x, 7),
        "spread": torch.full_like(rows, 7), "spread_plain": torch.full_like(rows, 7),
        "dot": torch.full_like(weights, 7),
    }  # fmt: skip
    combine_rows(outs["combine"], rows, index, weights)
    combine_rows(outs["combine_plain"], rows, index)
    spread_rows(outs["spread"], x, index, weights)
    spread_rows(outs["spread_plain"], x, index)
    dot_rows(outs["dot"], x, rows, index)
    return outs


@pytest.mark.parametrize("is_aligned", [True, False], ids=["aligned", "not"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_give_what_the_loops_of_the_host_give(kernels, dtype, is_aligned):
    for tokens, choices, width in SHAPES:
        index, count = routes(tokens, choices)
        x = normal(tokens, width, dtype=dtype, is_aligned=is_aligned)
        rows = normal(count, width, dtype=dtype, seed=1, is_aligned=is_aligned)
        weights, before = normal(tokens, choices, seed=2), len(kernels.launched)
        expected = passes(x, rows, index, weights)
        with launcher.standing_in(kernels):
            found = passes(x, rows, index, weights)
        assert len(kernels.launched) == before + 7
        for name in ("combine", "combine_plain", "spread", "spread_plain"):
            assert has_same_bits(found[name], expected[name]), (name, tokens, choices, width)
        # The kernel sums in fp32; the loops in fp64.
        size = (x.double().abs() @ rows.double().abs().t()).gather(1, index.clamp(min=0))
        assert ((found["dot"].double() - expected["dot"].double()).abs() <= width * 2.0**-24 * size).all()
        assert not found["dot"][index < 0].any()


def test_dot_depends_on_the_width_alone(kernels):
    index, count = routes(9, 2)
    for width in (64, 61):
        x, rows = normal(9, width, dtype=torch.bfloat16), normal(count, width, dtype=torch.bfloat16, seed=1)
        outs = [torch.empty(9, 2) for _ in range(2)]
        with launcher.standing_in(kernels):
            dot_rows(outs[0], x, rows, index)
            moved = (normal(*one.shape, dtype=one.dtype, is_aligned=False).copy_(one) for one in (x, rows))
            dot_rows(outs[1], *moved, index)
        assert has_same_bits(*outs)


def test_a_row_that_is_not_there_counts_as_dropped(kernels, monkeypatch):
    """On devices places are not checked; memory of others is not touched."""
    monkeypatch.setattr(permute, "_is_checked", lambda index: False)
    monkeypatch.setattr(permute, "_host_loops", lambda x: None)
    x, rows, weights = normal(2, 8), normal(3, 8, seed=1), normal(2, 2, seed=2)
    wrong, dropped = torch.tensor([[0, 3], [1 << 60, -7]]), torch.tensor([[0, -1], [-1, -1]])
    with launcher.standing_in(kernels):
        found, expected = passes(x, rows, wrong, weights), passes(x, rows, dropped, weights)
    assert all(has_same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("tokens", "choices", "count"), [(0, 2, 0), (0, 2, 3), (3, 2, 0), (3, 0, 2)])
def test_nothing_to_move(kernels, tokens, choices, count):
    index = torch.full((tokens, choices), -1)
    with launcher.standing_in(kernels):
        outs = passes(normal(tokens, 5), normal(count, 5, seed=1), index, normal(tokens, choices))
    assert not any(out.any() for out in outs.values())


def test_fp64_has_no_kernels(kernels):
    index, count = routes(3, 2)
    with launcher.standing_in(kernels):
        combine_rows(torch.empty(3, 5).double(), normal(count, 5).double(), index)
    assert not kernels.launched
