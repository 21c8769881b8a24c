"""What the compiled kernel visits and what it asks inside of tiles is what the layout and the masks say."""

from __future__ import annotations

import itertools

import pytest
import torch

from mpispeed.nn.attention import BlockList, flex


def list_of(heads: int, queries: int, keys: int, block: int, is_causal: bool) -> BlockList:
    """Random blocks, a row without any, and a full corner."""
    found = (torch.rand(heads, queries, keys, generator=torch.Generator().manual_seed(block)) < 0.3).int()
    found[0, 1] = 0
    found[-1, queries // 2 :, : keys // 2] = 1
    blocks = BlockList.of(found, block)
    return blocks.causal if is_causal else blocks


def allowed_of(blocks: BlockList) -> torch.Tensor:
    pairs = blocks.layout.repeat_interleave(blocks.block, 1).repeat_interleave(blocks.block, 2)
    return pairs.tril() if blocks.is_causal else pairs


def visited(counts: torch.Tensor, columns: torch.Tensor, size: int) -> torch.Tensor:
    """[heads, rows, size], how often each tile is in a list."""
    found = torch.zeros(*counts.shape[1:], size, dtype=torch.int32)
    for head, row in itertools.product(*(range(n) for n in counts.shape[1:])):
        listed = columns[0, head, row, : counts[0, head, row]].long()
        assert listed.tolist() == sorted(listed.tolist())
        found[head, row].index_add_(0, listed, torch.ones_like(listed, dtype=torch.int32))
    return found


SHAPES = [(16, 9, 9), (16, 40, 24), (48, 7, 5), (64, 9, 9), (128, 4, 6), (256, 3, 3)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("block", "queries", "keys"), SHAPES)
def test_tiles_and_what_is_allowed_inside_are_the_layout(block, queries, keys, heads, is_causal):
    if is_causal:
        keys = queries
    blocks = list_of(heads, queries, keys, block, is_causal)
    allowed = allowed_of(blocks)
    mask = flex.block_mask(blocks, torch.device("cpu"))
    assert flex.block_mask(blocks, torch.device("cpu")) is mask
    assert mask.seq_lengths == (queries * block, keys * block)
    # tokens up to the end of the last tiles: the kernel may ask there
    rows, columns = (-(-n * block // flex.TILE) for n in (queries, keys))
    of_heads, of_rows, of_columns = (torch.arange(n) for n in (heads, rows * flex.TILE, columns * flex.TILE))
    inside = mask.mask_mod(torch.tensor(0), of_heads[:, None, None], of_rows[:, None], of_columns)
    assert torch.equal(inside[:, : queries * block, : keys * block], allowed)
    assert not inside[:, :, keys * block :].any()
    if queries * block < inside.shape[1]:
        assert not inside[:, queries * block :].any()

    partial = visited(mask.kv_num_blocks, mask.kv_indices, columns)
    full = visited(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    assert int((partial + full).max()) == 1
    assert torch.equal(visited(mask.q_num_blocks, mask.q_indices, rows), partial.mT)
    assert torch.equal(visited(mask.full_q_num_blocks, mask.full_q_indices, rows), full.mT)
    # one offset serves both lists of the kernel
    assert mask.kv_indices.stride() == mask.full_kv_indices.stride()
    assert mask.q_indices.stride() == mask.full_q_indices.stride()
    tiled = inside.unflatten(2, (columns, flex.TILE)).unflatten(1, (rows, flex.TILE))
    assert torch.equal(full.bool(), tiled.all(4).all(2))
    assert not (tiled.any(4).any(2) & ~(partial + full).bool()).any()


@pytest.mark.parametrize("shape", [None, (12, 8), (3, 12, 8), (2, 1, 12, 8), (2, 3, 12, 8)], ids=str)
@pytest.mark.parametrize("has_keys", [False, True])
def test_scores_get_what_the_masks_add(shape, has_keys):
    q = torch.zeros(2, 3, 12, 4)
    source = torch.Generator().manual_seed(0)
    mask = None if shape is None else torch.randn(shape, generator=source)
    keys = torch.randn(2, 8, generator=source) if has_keys else None
    change = flex.change_of(q, mask, keys)
    if shape is None and not has_keys:
        assert change is None
        return
    scores = torch.randn(2, 3, 12, 8, generator=source)
    grid = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    expected = scores
    expected = expected if mask is None else expected + mask
    expected = expected if keys is None else expected + keys[:, None, None]
    assert torch.equal(change(scores, *grid), expected)


def test_the_cpu_is_not_served():
    q = torch.zeros(1, 1, 256, 64)
    assert not flex.serves(q, q, None)
