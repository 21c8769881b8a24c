"""Embedding gradients as rows: the values of dense sums, the traffic of the rows."""

import pytest
import torch
from torch import nn

from mpispeed.mesh import sim
from mpispeed.sharding.grads import GradHooks
from mpispeed.sharding.reducers import Averaging
from mpispeed.sharding.sparse import RowReducer, find_tables
from tests.helpers.stores import WHOLE, mesh_of, store_of, table_of

ROWS, WIDTH = 300, 6


class Words(nn.Module):
    """A table, a bag and a dense layer; `is_tied` uses the table densely too."""

    def __init__(self, *, is_sparse, is_tied=False):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=is_sparse)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=is_sparse)
        self.plain = nn.Embedding(7, WIDTH)
        self.is_tied = is_tied
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, tokens):
        x = self.middle(self.table(tokens)) + self.bag(tokens.reshape(-1, 1)).view(*tokens.shape, -1)
        x = torch.tanh(x + self.plain(tokens % 7))
        return (x @ self.table.weight[:9].T if self.is_tied else x).square().mean()


def tokens(rank, micro, count):
    generator = torch.Generator().manual_seed(100 * rank + micro)
    found = torch.randint(0, ROWS, (count,), generator=generator)
    return torch.cat([found, found[:2]])  # used twice


def run_steps(world, model, *, travels_as_rows, micros=2, counts=None, **more):
    """Sums of two steps, and what the last one sent."""
    mesh = mesh_of(world)
    table = table_of(model, world.size)
    names = {place.entry.name for param, place in table.places() if id(param) in find_tables(model)}
    reducer = RowReducer(names) if travels_as_rows else None
    store = store_of(mesh, WHOLE, table=table, reducer=reducer, **more)
    hooks = GradHooks(store.table, store)
    count = 5 if counts is None else counts[world.rank]
    results = []
    for step in range(2):
        mesh.comm_trace.reset()
        for micro in range(micros):
            store.begin_backward(reduces=micro == micros - 1)
            if count:
                model(tokens(world.rank, 10 * step + micro, count)).backward()
            store.end_backward()
        store.finish()
        results.append([store.shards.reduced(unit).clone() for unit in table.units])
        entries = mesh.comm_trace.entries()
        store.clear()
    hooks.remove()
    assert store.shards.arena.taken_count == 0
    mesh.close()
    return results, entries, table, names


def compare(size, *, is_tied=False, is_sparse=True, rtol=1e-5, atol=1e-7, **more):
    models = [
        (Words(is_sparse=is_sparse, is_tied=is_tied), Words(is_sparse=False, is_tied=is_tied)) for _ in range(size)
    ]

    def work(world):
        sparse, dense = models[world.rank]
        ours, entries, table, names = run_steps(world, sparse, travels_as_rows=True, **more)
        theirs, *_ = run_steps(world, dense, travels_as_rows=False, **more)
        for step, reference in zip(ours, theirs, strict=True):
            for a, b in zip(step, reference, strict=True):
                assert float(b.abs().max()) > 0
                torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        assert names == {"table.weight", "bag.weight", "plain.weight"}
        return entries, table

    return sim.run(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_rows_sum_up_to_the_dense_gradients(size, overlap):
    compare(size, is_overlapped=overlap)


@pytest.mark.parametrize("counts", [[0, 5, 1, 9], [0, 0, 0, 4]])
def test_ranks_use_different_numbers_of_rows_or_none(counts):
    compare(4, counts=counts)


def test_a_table_that_serves_a_dense_layer_too():
    compare(3, is_tied=True)


def test_16_bit_rows_and_factors():
    averaging = Averaging.of(3, predivide=3.0)
    # rows are rounded to 8 bits, scaled before, summed in fp32 and rounded once, as dense ones are
    compare(3, wire=torch.bfloat16, averaging=averaging, rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_traffic_is_that_of_the_rows(is_sparse):
    size, micros = 4, 1
    for rank, (entries, table) in enumerate(compare(size, micros=micros, is_sparse=is_sparse)):
        used = [tokens(r, 10, 5).unique().numel() for r in range(size)]
        gathers = entries["all_gather", ("data",)]
        per_table = size - 1, (size - 1) * max(used)
        of_small = (size - 1) * 8  # the number of rows of the table of 7, which travels whole
        assert gathers.bytes == of_small + 2 * (per_table[0] * 8 + per_table[1] * (4 + 4 * WIDTH)), rank
        dense = sum(unit.layout.padded for unit in table.units) - 2 * ROWS * WIDTH
        assert entries["all_reduce", ("data",)].bytes == 2 * dense * 4 * (size - 1) // size


def test_a_table_of_which_most_is_used_travels_whole():
    size = 2
    for entries, table in compare(size, counts=[3000, 1], micros=1):
        assert entries["all_gather", ("data",)].bytes == 3 * 8
        whole = sum(unit.layout.padded for unit in table.units)
        assert entries["all_reduce", ("data",)].bytes == 2 * whole * 4 * (size - 1) // size


def test_rows_of_a_backward_pass_that_is_given_up_are_forgotten():
    models = [Words(is_sparse=True) for _ in range(2)]

    def work(world):
        model, mesh = models[world.rank], mesh_of(world)
        table = table_of(model, 2)
        reducer = RowReducer({"table.weight", "bag.weight"})
        store = store_of(mesh, WHOLE, table=table, reducer=reducer)
        hooks = GradHooks(store.table, store)
        store.begin_backward(reduces=False)
        model(tokens(world.rank, 0, 40)).backward()
        store.end_backward()
        store.clear()
        mesh.comm_trace.reset()
        store.begin_backward(reduces=True)
        model(torch.tensor([3])).backward()
        store.end_backward()
        store.finish()
        assert mesh.comm_trace.entries()["all_gather", ("data",)].bytes == 2 * (8 + 1 * (4 + 4 * WIDTH))
        hooks.remove()
        mesh.close()

    sim.run(2, work)
