"""Block-sparse attention equals dense attention with -inf outside of the layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.nn.attention import BlockList, attend_blocks, blocks
from tests.helpers.dense_attention import BOUNDS, attention, bias_of, compare, inputs


def layout(heads: int, size: int, density: float) -> torch.Tensor:
    """Random blocks, one row without any, three rows alike, and one row with all."""
    found = (torch.rand(heads, size, size, generator=torch.Generator().manual_seed(size)) < density).long()
    found[:, 1], found[:, 5], found[:, 6], found[:, 8] = 0, found[:, 4], found[:, 4], 1
    return found


def tokens(found: torch.Tensor, block: int, is_causal: bool) -> torch.Tensor:
    pairs = found.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)
    return pairs.tril() if is_causal else pairs


def both(q, k, v, grad, found, block, **options) -> list[torch.Tensor]:
    out = attend_blocks(q, k, v, BlockList.of(found, block), **options)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("of_layout", [1, 4])
@pytest.mark.parametrize(("block", "density"), [(1, 0.5), (8, 0.2), (16, 0.9)])
def test_output_and_gradients_equal_dense_ones(block, density, of_layout, is_causal, dtype):
    found = layout(of_layout, 10, density)
    q, k, v, grad = inputs(2, 4, 2, (10 * block, 10 * block), 8, dtype)
    bias = bias_of(tokens(found, block, is_causal))
    ours = both(q, k, v, grad, found, block, is_causal=is_causal)
    compare(ours, attention(q, k, v, grad, bias), dtype)
    assert (ours[0][:, :, block : 2 * block] == 0).all()


@pytest.mark.parametrize("of_layout", [1, 4])
@pytest.mark.parametrize("shape", [(40, 40), (1, 40, 40), (4, 40, 40), (2, 1, 40, 40), (2, 4, 40, 40)])
def test_masks_of_pairs_and_of_keys_are_added(shape, of_layout, monkeypatch):
    monkeypatch.setitem(blocks.GATHERED_BYTES, "cpu", 1)  # one tile and one head in a call: lanes are cut, too
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    generator = torch.Generator().manual_seed(3)
    found = layout(of_layout, 10, 0.5)
    q, k, v, grad = inputs(2, 4, 2, (40, 40), 8, torch.float64)
    mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask[..., 17, :], mask[..., 20:23] = -torch.inf, -torch.inf
    keys = torch.zeros(2, 40, dtype=torch.float64)
    keys[1, 30:] = -torch.inf
    for is_causal in (False, True):
        bias = bias_of(tokens(found, 4, is_causal)) + mask + keys[:, None, None]
        ours = both(q, k, v, grad, found, 4, mask=mask, key_mask=keys, is_causal=is_causal)
        compare(ours, attention(q, k, v, grad, bias), torch.float64)
        assert (ours[0][:, :, 17] == 0).all()


def test_rectangles_have_a_number_of_key_blocks_of_their_own():
    found = (torch.rand(3, 7, generator=torch.Generator().manual_seed(0)) < 0.5).long()
    q, k, v, grad = inputs(1, 2, 1, (12, 28), 8, torch.float64)
    bias = bias_of(tokens(found.unsqueeze(0), 4, False))
    compare(both(q, k, v, grad, found, 4), attention(q, k, v, grad, bias), torch.float64)


def test_every_block_is_in_exactly_one_tile_and_equal_neighbours_share_one():
    for block, is_causal in itertools.product((1, 16, 64, 512), (False, True)):
        found = layout(1, 24, 0.3)
        blocks_of = BlockList.of(found, block)
        blocks_of = blocks_of.causal if is_causal else blocks_of
        counts = torch.zeros(24, 24, dtype=torch.long)
        for tiles in blocks_of.patterns[0].tiles:
            present = torch.ones(len(tiles.rows), tiles.height, tiles.columns.shape[1], dtype=torch.long)
            present = present if tiles.present is None else tiles.present.long()
            for row, columns, part in zip(tiles.rows.tolist(), tiles.columns, present, strict=True):
                counts[row : row + tiles.height, columns] += part
        expected = found[0].tril() if is_causal else found[0]
        assert torch.equal(counts, expected)
        assert blocks_of.count == int(expected.sum())
    windows = torch.block_diag(*[torch.ones(4, 4)] * 3)
    tiles = BlockList.of(windows, 16).patterns[0].tiles
    assert [(group.height, len(group.rows), group.present) for group in tiles] == [(4, 3, None)]


def test_keys_gathered_at_once_stay_within_their_bound(monkeypatch):
    """However many blocks there are: the largest tensor of a call is no larger than the bound and one tile ask for."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    seen = []
    kernel = blocks.partial
    monkeypatch.setattr(blocks, "partial", lambda q, k, v, **rest: seen.append(k.nbytes) or kernel(q, k, v, **rest))
    for size, count in ((32, 8), (64, 8), (64, 32)):
        order = torch.rand(size, size, generator=torch.Generator().manual_seed(0)).argsort(-1)
        found = torch.zeros(1, size, size).scatter_(2, order[None, :, :count], 1)
        q = torch.zeros(1, 2, size * 64, 64)
        attend_blocks(q, q, q, BlockList.of(found, 64))
    assert max(seen) <= blocks.GATHERED_BYTES["cpu"]


@pytest.mark.parametrize(
    ("found", "block", "options", "message"),
    [
        (torch.ones(1, 4, 4), 8, {}, r"32 queries and 32 keys, not 40 and 40; pad to whole blocks"),
        (torch.ones(3, 5, 5), 8, {}, r"the layout is for 3 heads, and q has 4"),
        (torch.full((5, 5), 2), 8, {}, r"a layout holds 0 and 1, not 2"),
        (torch.ones(5), 8, {}, r"a layout is \[heads or 1, query blocks, key blocks\]"),
        (torch.ones(5, 5), 0, {}, r"with block >= 1, not \(1, 5, 5\) with block 0"),
        (torch.ones(5, 5), 8, {"key_mask": torch.zeros(40)}, r"key_mask is \[B, S_k\] = \(1, 40\), not \(40,\)"),
        (torch.ones(5, 5), 8, {"mask": torch.zeros(3, 40, 40)}, r"mask is \[S, S_k\] or broadcasts"),
    ],
)
def test_what_does_not_fit_is_refused(found, block, options, message):
    q = torch.zeros(1, 4, 40, 8)
    with pytest.raises(UsageError, match=message):
        attend_blocks(q, q, q, BlockList.of(found, block), **options)


def test_causal_attention_between_lengths_that_differ_is_refused():
    q, k = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 16, 8)
    with pytest.raises(UsageError, match="as many keys as queries, not 16 and 8"):
        attend_blocks(q, k, k, BlockList.of(torch.ones(2, 4), 4), is_causal=True)
