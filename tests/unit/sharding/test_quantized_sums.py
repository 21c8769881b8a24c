"""Gradients that are summed in 4-bit codes, inside nodes first."""

import pytest
import torch
from torch import nn

from mpispeed.mesh import sim
from mpispeed.mesh.compressed.quantized import Feedback
from mpispeed.sharding.quantized import QuantizedReducer
from mpispeed.sharding.reducers import PlainReducer
from mpispeed.store.layout import BLOCK
from tests.helpers.codec import reduce_scatter_bytes
from tests.helpers.stores import NESTED, WHOLE, backward, collect, gradient, mesh_of, store_of, table_of


def mixed():
    """A unit with matrices and one of vectors alone."""
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(40, 40), nn.LayerNorm(40)])})


def quantized(feedback=None):
    return QuantizedReducer("data.inner", "data.outer", PlainReducer(), feedback=feedback)


def exact(unit, ranks, micro=0):
    whole = torch.zeros(unit.layout.padded)
    for entry in unit.layout.entries:
        whole[entry.span.slice] = (sum(gradient(r, micro, entry) for r in range(ranks)) / ranks).reshape(-1)
    return whole


@pytest.mark.parametrize(("ranks", "inner"), [(4, 2), (2, 1), (3, 1), (6, 3)])
@pytest.mark.parametrize("rest", [WHOLE, NESTED])
@pytest.mark.parametrize("overlap", [False, True])
def test_sums_are_near_and_travel_as_codes(ranks, inner, rest, overlap):
    def work(world):
        mesh = mesh_of(world, inner)
        store = store_of(mesh, rest, NESTED, table=table_of(mixed(), ranks), reducer=quantized(), is_overlapped=overlap)
        backward(store, world.rank, 0, reduces=True)
        store.finish()
        matrices, vectors = store.table.units
        found = collect(mesh, store)
        assert all(len(entry.shape) == 1 for entry in vectors.layout.entries)
        torch.testing.assert_close(found[1], exact(vectors, ranks), rtol=1e-5, atol=1e-6)
        # Each value is off by at most half a level, m / 14 for the largest magnitude m of its block, in each hop.
        # Gradients are below 5 and so is their mean, and after the first hop sums of `inner` of them are rounded.
        worst = float((found[0] - exact(matrices, ranks)).abs().max())
        assert 0 < worst <= 5 / 14 * (1 + (inner > 1))
        entries = mesh.comm_trace.entries()
        shard = matrices.layout.padded // ranks
        inner_bytes, outer_bytes = reduce_scatter_bytes(shard, inner, ranks // inner, BLOCK)
        assert entries["all_to_all", ("data.outer" if inner > 1 else "data",)].bytes == outer_bytes
        if inner > 1:
            assert entries["all_to_all", ("data.inner",)].bytes == inner_bytes
        mesh.close()

    sim.run(ranks, work)


def test_kept_errors_bring_the_mean_of_many_sums_to_the_exact_one():
    ranks, steps = 4, 60

    def mean_error(world, feedback):
        mesh = mesh_of(world, 2)
        store = store_of(mesh, NESTED, table=table_of(mixed(), ranks), reducer=quantized(feedback))
        total = 0
        for _ in range(steps):
            backward(store, world.rank, 0, reduces=True)
            store.finish()
            total = total + collect(mesh, store)[0]
            store.clear()
        mesh.close()
        return float((total / steps - exact(store.table.units[0], ranks)).abs().mean())

    def work(world):
        kept = mean_error(world, lambda: Feedback(0.5, 1000))
        assert kept < 0.2 * mean_error(world, None)

    sim.run(ranks, work)


def test_errors_are_forgotten_after_an_overflow_and_follow_the_loss_scale():
    made = []

    def remember():
        made.append(Feedback(0.5, 1000))
        return made[-1]

    def work(world):
        mesh = mesh_of(world, 1)
        store = store_of(mesh, NESTED, table=table_of(mixed(), 2), reducer=quantized(remember))
        backward(store, world.rank, 0, reduces=True)
        store.finish()
        (unit,) = (unit for unit in store.table.units if unit.name == "blocks.0")
        first = store.shards.reduced(unit).clone()
        store.rescale(0.5, is_overflow=True)
        backward(store, world.rank, 0, reduces=True)
        store.finish()
        again = store.shards.reduced(unit) - first  # the second micro-step was added to the first
        mesh.close()
        return torch.equal(again, first)

    assert sim.run(2, work) == [True, True]
    assert len(made) == 2


def test_a_doubled_loss_scale_doubles_sums_of_doubled_gradients():
    def work(world):
        mesh = mesh_of(world, 1)
        store = store_of(mesh, NESTED, table=table_of(mixed(), 2), reducer=quantized(lambda: Feedback(0.5, 1000)))
        sums = []
        for factors in ((1.0, 1.0), (1.0, 2.0)):
            for step, factor in enumerate(factors):
                store.begin_backward(reduces=True)
                for unit in reversed(store.table.units):
                    for entry in unit.layout.entries:
                        store.land(unit, entry, gradient(world.rank, step, entry) * factor)
                store.end_backward()
                store.finish()
                last = store.shards.reduced(store.table.units[0]).clone()
                store.clear()
                if step == 0 and factors[1] != 1.0:
                    store.rescale(2.0, is_overflow=False)
            sums.append(last)
            store.rescale(1.0, is_overflow=True)
        mesh.close()
        return torch.equal(sums[0] * 2, sums[1])

    assert sim.run(2, work) == [True, True]
