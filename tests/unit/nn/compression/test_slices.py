"""Compression of a full weight by the ranks that have slices of it."""

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.mesh import sim
from mpispeed.nn.compression.quantizers import Quantizer, fake_quantize
from mpispeed.nn.compression.slices import SlicedWeight, Slices, shared_range
from mpispeed.nn.tensor.tensor_cut import TensorCut


@st.composite
def cuts(draw):
    """Cuts of weights with two or three dims."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    kind = draw(st.sampled_from(["column", "row", "sub", "vocab"]))
    dim = 0 if kind == "vocab" else draw(st.integers(0, 1))
    if kind != "sub":
        return TensorCut(kind, dim, shape)
    parts = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)))
    shape = (*shape[:dim], sum(parts), *shape[dim + 1 :])
    return TensorCut(kind, dim, shape, parts, draw(st.just(()) | st.just((2,) * len(parts))))


def drawn(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def on_ranks(size, cut, work):
    return sim.run(size, lambda world: work(Slices(world.comm, cut)))


@given(cuts(), st.integers(2, 4), st.integers(1, 8), st.data())
def test_slices_are_quantized_as_the_full_weight(cut, size, bits, data):
    count = math.prod(cut.shape)
    groups = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    kind = data.draw(st.sampled_from(["symmetric", "asymmetric"])) if bits > 2 else "symmetric"
    rounding = data.draw(st.sampled_from(["nearest", "stochastic"])) if bits > 2 else "nearest"
    quantizer, whole = Quantizer(kind, rounding, groups), drawn(cut.shape)
    expected = fake_quantize(whole, bits, quantizer, 7)

    def work(slices):
        own = slices.own(whole)
        return own, slices.own(expected), fake_quantize(own, bits, quantizer, 7, SlicedWeight(own, groups, slices))

    for own, wanted, found in on_ranks(size, cut, work):
        if bits > 2:
            assert torch.equal(found, wanted)
        else:  # means: their sums have another order
            assert torch.allclose(found, wanted, rtol=1e-6)
        assert found.shape == own.shape


@given(cuts(), st.integers(2, 4))
def test_vectors_of_a_dim_and_their_gradients(cut, size):
    for dim in (0, 1):
        vector = torch.arange(1.0, cut.shape[dim] + 1)

        def work(slices, dim=dim, vector=vector):
            whole = vector.clone().requires_grad_()
            own = slices.along(whole, dim)
            own.sum().backward()
            return own.detach(), whole.grad

        alone = replace(cut, dim=0, shape=(cut.shape[dim],)) if dim == cut.dim else None
        for rank, (own, grad) in enumerate(on_ranks(size, cut, work)):
            assert torch.equal(own, alone.take(vector, rank, size) if alone else vector)
            assert torch.equal(grad, torch.full_like(vector, 1.0 if alone else size))


@given(cuts(), st.integers(2, 4))
def test_full_tensors_and_ranges_of_parts(cut, size):
    whole = drawn(cut.shape)
    dims = sorted({0, cut.dim})

    def work(slices):
        part = slices.own(whole)
        return slices.whole(part), shared_range(part, slices.comm, dims)

    for again, ends in on_ranks(size, cut, work):
        assert torch.equal(again, whole)
        if cut.kind != "vocab":  # whose padding is zero
            assert torch.equal(ends, torch.stack([whole.amin(dims, True), whole.amax(dims, True)]))
