"""Gradient stores on simulated ranks: every placement delivers the mean over ranks, in every order of arrival."""

import random

import pytest
import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.mesh import sim
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.sharding.grad_shards import global_square_sum
from mpispeed.sharding.reducers import Averaging
from mpispeed.sharding.units import plan_units
from mpispeed.store.placement import REPLICATED, Placement
from tests.helpers.stores import store_of

DATA = Placement(("data",))
ROWS = {"whole": (REPLICATED, REPLICATED), "whole to cut": (REPLICATED, DATA), "cut": (DATA, DATA)}


def small_model():
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2))


def make_store(world, row, *, overlap=False, wire=torch.float32, averaging=None):
    model = small_model()
    mesh = Mesh(Topology({"pipe": 1, "data": world.size, "model": 1}), world, reduction="ordered")
    table = plan_units(model, {id(p): 0 for p in model.parameters()}, world.size, 10**9)
    rest, target = ROWS[row]
    averaging = averaging or Averaging.of(world.size)
    store = store_of(mesh, rest, target, table=table, wire=wire, averaging=averaging, is_overlapped=overlap)
    return store.table, mesh, store


def gradient(rank, micro, entry):
    generator = torch.Generator().manual_seed(1000 * rank + 100 * micro + entry.offset)
    return torch.randn(entry.shape, generator=generator)


def land_all(store, table, rank, micro, *, skip=(), shuffle=False):
    places = [(unit, entry) for unit in reversed(table.units) for entry in reversed(unit.layout.entries)]
    if shuffle:
        random.Random(rank).shuffle(places)
    for unit, entry in places:
        if entry.name not in skip:
            store.land(unit, entry, gradient(rank, micro, entry))


def check_mean(store, table, size, micros, skip=()):
    for unit in table.units:
        whole = torch.zeros(unit.layout.padded)
        for entry in unit.layout.entries:
            if entry.name not in skip:
                total = sum(gradient(r, m, entry) for r in range(size) for m in micros)
                whole[entry.span.slice] = (total / size).reshape(-1)
        torch.testing.assert_close(
            store.shards.reduced(unit), whole[store.shards.target_span(unit).slice], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("row", sorted(ROWS))
@pytest.mark.parametrize("overlap", [False, True])
def test_mean_over_ranks_and_micro_steps(size, row, overlap):
    def work(world):
        table, mesh, store = make_store(world, row, overlap=overlap)
        for micro in range(3):
            store.begin_backward(reduces=micro == 2)
            land_all(store, table, world.rank, micro, shuffle=True)
            store.end_backward()
        store.finish()
        check_mean(store, table, size, range(3))
        store.clear()
        store.begin_backward(reduces=True)  # nothing of the last step may be left
        land_all(store, table, world.rank, 7)
        store.end_backward()
        store.finish()
        check_mean(store, table, size, [7])
        assert store.shards.arena.taken_count == 0
        mesh.close()

    sim.run(size, work)


@pytest.mark.parametrize("row", sorted(ROWS))
def test_missing_gradients_are_zeros(row):
    def work(world):
        table, mesh, store = make_store(world, row)
        store.begin_backward(reduces=True)
        land_all(store, table, world.rank, 0, skip=("1.weight", "2.bias"))
        store.end_backward()
        store.finish()
        check_mean(store, table, 2, [0], skip=("1.weight", "2.bias"))
        mesh.close()

    sim.run(2, work)


@pytest.mark.parametrize("row", sorted(ROWS))
@pytest.mark.parametrize("skip", [(), ("1.weight", "1.bias")])
def test_units_that_are_not_expected_are_the_last_in_any_order_of_arrival(row, skip):
    """Also if their gradients come: ranks whose gradients come in other orders sum in one."""

    def work(world):
        table, mesh, store = make_store(world, row)
        absent = [table.by_name("1.weight").unit.index]
        store.absent, launched, launch = frozenset(absent), [], store._launch

        def noted(unit):
            launched.append(unit.index)
            launch(unit)

        store._launch = noted
        store.begin_backward(reduces=True)
        land_all(store, table, world.rank, 0, skip=skip, shuffle=True)
        store.end_backward()
        store.finish()
        others = [unit.index for unit in reversed(table.units) if unit.index not in absent]
        assert others and launched == [*others, *absent]
        check_mean(store, table, 3, [0], skip=skip)
        mesh.close()

    sim.run(3, work)


@pytest.mark.parametrize(
    "averaging",
    [Averaging.of(2, is_prescaled=True), Averaging.of(2, predivide=2.0), Averaging.of(2, predivide=3.0)],
)
@pytest.mark.parametrize("row", sorted(ROWS))
def test_prescale_and_predivide_give_the_same_mean(row, averaging):
    def work(world):
        table, mesh, store = make_store(world, row, averaging=averaging)
        store.begin_backward(reduces=True)
        land_all(store, table, world.rank, 0)
        store.end_backward()
        store.finish()
        check_mean(store, table, 2, [0])
        mesh.close()

    sim.run(2, work)


@pytest.mark.parametrize("row", sorted(ROWS))
def test_16_bit_wire_sums_in_fp32(row):
    def work(world):
        table, mesh, store = make_store(world, row, wire=torch.bfloat16)
        store.begin_backward(reduces=True)
        land_all(store, table, world.rank, 0)
        store.end_backward()
        store.finish()
        for unit in table.units:
            for entry, common in unit.layout.overlaps(store.shards.target_span(unit)):
                rounded = [gradient(r, 0, entry).bfloat16().float().reshape(-1) for r in range(3)]
                mean = (rounded[0] + rounded[1] + rounded[2]) * (1 / 3)
                expected = mean[common.start - entry.offset : common.stop - entry.offset]
                own = store.shards.reduced(unit)[common.shifted(-store.shards.target_span(unit).start).slice]
                # whole gradients are rounded once more for the way back
                torch.testing.assert_close(own, expected, rtol=2**-8 if row == "whole" else 1e-6, atol=1e-7)
        mesh.close()

    sim.run(3, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_norm_has_the_same_bits_for_every_placement(size):
    def work(world):
        sums = []
        for row in sorted(ROWS):
            table, mesh, store = make_store(world, row)
            store.begin_backward(reduces=True)
            land_all(store, table, 0, 0)  # equal on all ranks, so that the mean is exact for every size
            store.end_backward()
            store.finish()
            sums.append(global_square_sum(mesh, store.shards, threads=1)[0])
            mesh.close()
        return sums

    everything = [value for sums in sim.run(size, work) for value in sums]
    assert len(set(everything)) == 1
    model = small_model()
    table = plan_units(model, {id(p): 0 for p in model.parameters()}, 1, 10**9)
    exact = sum(float(gradient(0, 0, e).double().square().sum()) for u in table.units for e in u.layout.entries)
    assert everything[0] == pytest.approx(exact, rel=1e-6 if size == 3 else 1e-12)


def test_a_second_backward_after_the_reduction_is_refused():
    def work(world):
        table, mesh, store = make_store(world, "whole")
        store.begin_backward(reduces=True)
        land_all(store, table, world.rank, 0)
        with pytest.raises(UsageError, match="second gradient"):
            land_all(store, table, world.rank, 0)
        mesh.close()

    sim.run(1, work)
