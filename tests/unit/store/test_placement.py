"""Placements are pure; their moves on buffers are checked against whole arrays on simulated ranks."""

import pytest
import torch

from mpispeed.base.errors import StoreError
from mpispeed.mesh import sim
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.store.placement import REPLICATED, Move, Placement, moves, reduce_moves
from mpispeed.store.transfers import all_gather_into, own_span, reduce_into

DATA = Placement(("data",))


def test_table_of_moves():
    assert reduce_moves(("data",), REPLICATED) == (Move("all_reduce", ("data",)),)
    assert reduce_moves(("data",), DATA) == (Move("reduce_scatter", ("data",)),)
    assert reduce_moves(("outer", "inner"), Placement(("inner",))) == (
        Move("reduce_scatter", ("inner",)),
        Move("all_reduce", ("outer",)),
    )
    assert moves(DATA, REPLICATED) == (Move("all_gather", ("data",)),)
    assert moves(REPLICATED, DATA) == (Move("cut", ("data",)),)
    assert moves(DATA, DATA) == ()


def test_impossible_moves_are_refused():
    with pytest.raises(StoreError, match="neither begins the other"):
        moves(Placement(("a",)), Placement(("b",)))
    with pytest.raises(StoreError, match="other sums"):
        reduce_moves(("data",), Placement(("model",)))


@pytest.mark.parametrize("cut", [(), ("inner",), ("inner", "outer")])
def test_reduce_then_gather_gives_the_whole_sum(cut):
    padded, outer, inner = 24, 2, 3
    placement = Placement(cut)

    def work(world):
        mesh = Mesh(Topology({"outer": outer, "inner": inner}), world)
        full = torch.arange(padded, dtype=torch.float64) * (mesh.rank + 1)
        span = own_span(mesh, placement, padded)
        target = torch.empty(span.numel, dtype=torch.float64)
        reduce_into(mesh, full, target, ("outer", "inner"), placement, scale=0.5)
        whole = torch.full((padded,), -1.0, dtype=torch.float64)
        whole[span.slice] = target
        all_gather_into(mesh, whole, target, placement, REPLICATED, padded)
        return whole

    expected = torch.arange(padded, dtype=torch.float64) * sum(range(1, 7)) * 0.5
    for whole in sim.run(outer * inner, work):
        assert torch.equal(whole, expected)
