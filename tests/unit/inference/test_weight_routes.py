"""Ways of elements from parts of a tensor into slices: equal to slicing the whole tensor, in pieces of any length."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.ckpt.foreign.values import Plain
from mpispeed.inference.weights.routes import routes
from mpispeed.inference.weights.sources import Shard, Source
from mpispeed.nn.tensor import TensorCut


@st.composite
def cuts(draw):
    """(shape, dim, cut) of a sliced tensor, or None for one that is whole."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["column", "sub", "vocab", "whole"]))
    if kind == "whole":
        return shape, dim, None
    if kind == "vocab":
        return shape, 0, TensorCut("vocab", 0, shape)
    if kind == "column":
        return shape, dim, TensorCut("column", dim, shape, (), (draw(st.integers(1, 3)),))
    first = draw(st.integers(0, shape[dim]))
    return shape, dim, TensorCut("sub", dim, shape, (first, shape[dim] - first))


def source_of(whole, cut, dim, size):
    """A tensor in the parts of `size` ranks, with padding of another number."""
    shards = []
    for rank in range(size):
        part = cut.take(whole, rank, size)
        shards.append(Shard(Plain(part), tuple(cut.ranges(rank, size)), part.shape[dim]))
    return Source("x", tuple(whole.shape), whole.dtype, tuple(shards), dim, "file")


@given(cuts(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.booleans())
def test_slices_are_made_of_any_pieces(given_cut, size, parts, step, is_whole):
    shape, dim, cut = given_cut
    whole = torch.arange(torch.tensor(shape).prod()).view(shape) + 1
    source = Source("x", shape, whole.dtype, (Shard(Plain(whole), ((0, shape[0]),), shape[0]),), 0, "file")
    if cut is not None and not is_whole:
        source = source_of(whole, cut, dim, parts)
    for rank in range(size):
        wanted = whole if cut is None else cut.take(whole, rank, size)
        found = torch.zeros(wanted.shape, dtype=torch.float64)
        for shard, route in zip(source.shards, routes(source, cut, rank, size), strict=True):
            for first in range(0, shard.values.numel, step):
                last = min(first + step, shard.values.numel)
                values, before = shard.values.read(first, last), found.clone()
                route.place(found, first, values)
                assert route.is_used(first, last) == (not torch.equal(found, before))
                straight = route.direct(first, last)
                if straight is not None:
                    assert torch.equal(found.view(-1)[straight : straight + last - first], values.double())
            here = route.one_range()
            if here is not None:
                assert torch.equal(shard.values.read(*here).view(wanted.shape), wanted)
        assert torch.equal(found, wanted.double())
