"""The attention core on a GPU: kernels, pieces, a ring's steps and blocks against plain attention in fp64."""

import itertools

import pytest
import torch

from mpispeed.nn.attention import (
    BlockList,
    attend,
    attend_blocks,
    flex,
    kernels,
    merge,
    partial,
    pieces_of,
    run,
    run_backward,
)
from mpispeed.nn.attention.core import begin
from mpispeed.nn.attention.kernels import partial_backward

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Of the largest element, or of 1, the size of the inputs: 16 bits round weights once more, fp32 has other orders."""
DTYPES = list(BOUNDS)
HEADS = [(4, 4), (8, 2), (3, 1)]


def drawn(device, dtype, batch, heads, groups, queries, keys, width=64, seed=0):
    """q, k, v and a gradient of the output."""
    source = torch.Generator(device).manual_seed(seed)
    shapes = [(batch, heads, queries, width), *[(batch, groups, keys, width)] * 2, (batch, heads, queries, width)]
    return [torch.randn(shape, device=device, generator=source).to(dtype) for shape in shapes]


def plain(q, k, v, grad, allowed=None, mask=None):
    """Output, log-sum-exp and gradients of q, k, v in fp64; queries without a key give zeros."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask.double()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    is_blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_blind, 0).softmax(-1).masked_fill(is_blind, 0)
    out = weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def check(found, expected, dtype, names=("out", "lse", "dq", "dk", "dv")):
    for name, ours, wanted in zip(names, found, expected, strict=True):
        seen = wanted.isfinite()
        assert torch.equal(ours.isfinite(), seen), name
        off = (ours.double() - wanted).where(seen, 0).abs().max().item()
        assert off <= BOUNDS[dtype] * max(1.0, wanted.where(seen, 0).abs().max().item()), (name, off)


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("queries", "keys", "width"), [(1, 1, 64), (77, 200, 64), (129, 33, 20), (64, 128, 128)])
def test_kernels_are_plain_attention(device, dtype, queries, keys, width, heads, groups):
    q, k, v, grad = drawn(device, dtype, 2, heads, groups, queries, keys, width)
    out, lse = partial(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    check([out, lse, *partial_backward(grad, q, k, v, out, lse)], plain(q, k, v, grad), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "width"), [(1, 64), (65, 64), (200, 20), (384, 128), (130, 264)])
def test_causal_squares(device, dtype, length, width):
    q, k, v, grad = drawn(device, dtype, 2, 4, 2, length, length, width)
    out, lse = partial(q, k, v, is_causal=True)
    found = [out, lse, *partial_backward(grad, q, k, v, out, lse, is_causal=True)]
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    check(found, plain(q, k, v, grad, allowed), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 90), (2, 1, 70, 90), (2, 1, 1, 90), (1, 4, 70, 90)], ids=str)
def test_masks_are_added_and_hidden_rows_are_zero(device, dtype, shape):
    q, k, v, grad = drawn(device, dtype, 2, 4, 2, 70, 90)
    source = torch.Generator(device).manual_seed(1)
    mask = torch.randn(shape, device=device, generator=source).to(dtype)
    hidden = torch.rand(shape, device=device, generator=source) < 0.3
    if shape[-2] > 1:
        hidden[..., 5, :] = True
    mask = mask.masked_fill(hidden, -torch.inf)
    out, lse = partial(q, k, v, mask=mask)
    found = [out, lse, *partial_backward(grad, q, k, v, out, lse, mask=mask)]
    check(found, plain(q, k, v, grad, mask=mask), dtype)


def allowed_pairs(pieces, batch, queries, keys, device):
    allowed = torch.zeros(batch, 1, queries, keys, dtype=torch.int32, device=device)
    for piece in pieces:
        rows = slice(None) if piece.row is None else slice(piece.row, piece.row + 1)
        here = allowed[rows, :, slice(*piece.queries), slice(*piece.keys)]
        here += torch.ones_like(here).tril() if piece.is_causal else 1
    assert int(allowed.max()) <= 1
    return allowed.bool()


LISTS = {
    "documents": {"causal": True, "spans": [[(0, 100), (100, 107), (107, 300)]] * 2},
    "padding": {"causal": True, "spans": [[(0, 299)], [(40, 170)]]},
    "both ways": {"causal": False, "spans": [[(0, 150), (150, 300)], [(1, 2), (10, 280)]]},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_pieces(device, dtype, name):
    pieces = pieces_of([(0, 300)], [(0, 300)], **LISTS[name])
    q, k, v, grad = drawn(device, dtype, 2, 4, 2, 300, 300)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, pieces)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    expected = plain(q, k, v, grad, allowed_pairs(pieces, 2, 300, 300, device))
    check(found, [expected[0], *expected[2:]], dtype, ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_steps_of_a_ring(device, dtype, causal):
    """Keys arrive part by part, in a zigzag: sums of one rank are those of the whole sequence at once."""
    length, ranks = 403, 3
    cuts = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
    chunks = list(itertools.pairwise(cuts))
    owned = [(chunks[i], chunks[-1 - i]) for i in range(ranks)]
    q, k, v, grad = drawn(device, dtype, 2, 4, 2, length, length)
    allowed = torch.ones(length, length, dtype=torch.bool, device=device)
    expected = plain(q, k, v, grad, allowed.tril() if causal else allowed)
    found = [torch.zeros_like(x, dtype=torch.float32) for x in expected]

    def local(x, rank):
        return torch.cat([x[:, :, start:stop] for start, stop in owned[rank]], 2)

    for rank in range(ranks):
        mine, slope = local(q, rank), local(grad, rank)
        steps = [pieces_of(owned[rank], owned[(rank - i) % ranks], causal=causal) for i in range(ranks)]
        others = [(local(k, (rank - i) % ranks), local(v, (rank - i) % ranks)) for i in range(ranks)]
        sums = begin(mine)
        for pieces, (keys, values) in zip(steps, others, strict=True):
            run(mine, keys, values, pieces, into=sums)
        out, lse = sums[0].to(dtype), sums[1]
        dq = torch.zeros_like(mine, dtype=torch.float32)
        where = torch.cat([torch.arange(*part, device=device) for part in owned[rank]])
        for i, (pieces, (keys, values)) in enumerate(zip(steps, others, strict=True)):
            dk, dv = (torch.zeros_like(keys, dtype=torch.float32) for _ in range(2))
            run_backward(slope, mine, keys, values, out, lse, pieces, into=(dq, dk, dv))
            there = torch.cat([torch.arange(*part, device=device) for part in owned[(rank - i) % ranks]])
            found[3].index_add_(2, there, dk)
            found[4].index_add_(2, there, dv)
        for total, part in zip(found, (out.float(), lse, dq), strict=False):
            total.index_add_(2, where, part)
    check(found, expected, dtype)


def layout_of(heads, blocks, kind):
    """Some blocks of each row, other ones in each head; a row without any; or neighbours and first blocks."""
    source = torch.Generator().manual_seed(2)
    if kind == "window":
        near = torch.ones(blocks, blocks).tril(1).triu(-1)
        near[:, 0] = 1
        return near.unsqueeze(0)
    layout = (torch.rand(1 if kind == "random" else heads, blocks, blocks, generator=source) < 0.4).int()
    layout[0, 2] = 0
    return layout


def check_blocks(device, dtype, causal, block, kind, blocks=9, **options):
    """`attend_blocks` beside plain attention; by the compiled kernel or by gathered keys as flex.IS_WANTED says."""
    heads, length = 4, blocks * block
    layout = layout_of(heads, blocks, kind)
    q, k, v, grad = drawn(device, dtype, 2, heads, 2, length, length)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend_blocks(*leaves, BlockList.of(layout, block), is_causal=causal, **options)
    # masks of pairs in 16 bits need more shared memory than there is
    is_compiled = flex.IS_WANTED and ("mask" not in options or dtype == torch.float32)
    assert ("_AttendBlocks" in type(out.grad_fn).__name__) != is_compiled
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    allowed = layout.bool().to(device).repeat_interleave(block, 1).repeat_interleave(block, 2)
    mask = options.get("mask")
    if mask is not None:
        mask = mask.double() + options["key_mask"].double()[:, None, None]
    expected = plain(q, k, v, grad, allowed.tril() if causal else allowed, mask)
    check(found, [expected[0], *expected[2:]], dtype, ("out", "dq", "dk", "dv"))


def masks_of(device, dtype, shape):
    """Of pairs and of keys, with a hidden row and hidden keys."""
    source = torch.Generator(device).manual_seed(3)
    mask, of_keys = (torch.randn(size, device=device, generator=source).to(dtype) for size in (shape, (2, 144)))
    of_keys[1, 100:] = -torch.inf
    mask[..., 7, :] = -torch.inf
    return {"mask": mask, "key_mask": of_keys}


MASKS = [(144, 144), (2, 4, 144, 144)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kind", ["random", "of heads", "window"])
def test_gathered_blocks_are_masked_attention(device, monkeypatch, dtype, causal, block, kind):
    monkeypatch.setattr(flex, "IS_WANTED", False)
    check_blocks(device, dtype, causal, block, kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_gathered_blocks_take_masks_of_keys_and_of_pairs(device, monkeypatch, dtype, shape):
    monkeypatch.setattr(flex, "IS_WANTED", False)
    check_blocks(device, dtype, False, 16, "random", **masks_of(device, dtype, shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "block", "causal"), [("random", 64, True), ("of heads", 16, False), ("window", 128, True)]
)
def test_compiled_blocks_are_masked_attention(device, dtype, causal, block, kind):
    check_blocks(device, dtype, causal, block, kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_compiled_blocks_take_masks_where_they_fit(device, dtype, shape):
    check_blocks(device, dtype, True, 16, "random", **masks_of(device, dtype, shape))


def test_merges_of_what_has_no_key(device):
    out, lse = torch.zeros(1, 1, 3, 8, device=device), torch.full((1, 1, 3), -torch.inf, device=device)
    other, other_lse = torch.randn(1, 1, 3, 8, device=device), torch.tensor([[[0.5, -torch.inf, 2.0]]], device=device)
    other[:, :, 1] = 0
    merge(out, lse, other, other_lse)
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)


def test_strides_and_offsets_of_views(device):
    """Heads behind the length, q, k, v in one tensor, a length that begins in the middle of a row."""
    packed = torch.randn(2, 100, 3, 4, 64, device=device, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2)[:, :, 3:96] for x in packed.unbind(2))
    grad = torch.ones((), device=device, dtype=torch.bfloat16).expand(q.shape)
    out, lse = partial(q, k, v, is_causal=True)
    found = [out, lse, *partial_backward(grad, q, k, v, out, lse, is_causal=True)]
    check(found, plain(q, k, v, grad, torch.ones(93, 93, dtype=torch.bool, device=device).tril()), torch.bfloat16)


def test_the_kernel_is_the_best_of_the_device(device):
    q = torch.empty(1, 1, 1, 64, device=device)
    is_new = torch.cuda.get_device_capability(device)[0] >= 8
    assert kernels._name(q.half(), None) == ("flash" if is_new else "efficient")
    assert kernels._name(q, None) == "efficient"
    assert kernels._name(q.double(), None) == "math"


def test_long_documents_take_memory_of_their_length_only(device):
    """65,536 tokens: a mask of all pairs alone would be 4 GiB."""
    q, k, v, grad = drawn(device, torch.bfloat16, 1, 2, 1, 1 << 16, 1 << 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pieces = pieces_of([(0, 1 << 16)], [(0, 1 << 16)], causal=True, spans=[[(0, 50_000), (50_000, 1 << 16)]])
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = attend(*leaves, pieces)
    found = torch.autograd.grad(out, leaves, grad)
    assert all(one.isfinite().all() for one in (out, *found))
    assert torch.cuda.max_memory_allocated(device) - before < 64 * q.nbytes
