"""Sums by slots on simulated ranks: the bits of one sum over all slots, at any placement, dtype and number of ranks."""

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.mesh import sim
from mpispeed.native.reduce import tree_sum
from mpispeed.plan.slots import Slots
from mpispeed.sharding.grad_shards import GradShards
from mpispeed.sharding.grads import GradStore
from mpispeed.sharding.reducers import SumChannel
from mpispeed.sharding.slot_sums import Leaves, SlotSums
from tests.helpers.stores import DATA, NESTED, WHOLE, collect, gradient, mesh_of, placed, small_model, table_of

ROWS = {"whole": (WHOLE, WHOLE), "whole to cut": (WHOLE, DATA), "cut": (DATA, DATA), "nested": (NESTED, NESTED)}


def store_of(mesh, row, slots, *, wire=torch.float32, accumulate=torch.float32, is_overlapped=False):
    rest, target = ROWS[row]
    table = placed(table_of(small_model(), mesh["data"].size), mesh, rest, target, wire=wire, accumulate=accumulate)
    shards, channel = GradShards(table, mesh), SumChannel.of(mesh, is_overlapped=is_overlapped)

    def leaves_of(axes):
        return Leaves(slots.leaves_of(mesh["data"].size // mesh[axes].size))

    return GradStore(shards, SlotSums(shards, channel.mesh, slots.scale, leaves_of, passes=slots.per_rank), channel)


def land(store, slot, skip=()):
    for unit in reversed(store.table.units):
        for entry in reversed(unit.layout.entries):
            if entry.name not in skip:
                store.land(unit, entry, gradient(slot, 0, entry))


def run(store, slots, rank, part=0, steps=None):
    for step in range(slots.per_rank if steps is None else steps):
        store.begin_backward(reduces=step == slots.per_rank - 1)
        land(store, slots.slot(rank, step) + 1000 * part)
        store.end_backward()
    store.finish()


def expected(table, names, wire, scale):
    """Whole buffers: one sum over the gradients of all slots, in their order, each rounded once."""
    found = []
    for unit in table.units:
        leaves = []
        for name in names:
            leaf = torch.zeros(unit.layout.padded)
            for entry in unit.layout.entries if name is not None else ():
                leaf[entry.span.slice] = gradient(name, 0, entry).reshape(-1)
            leaves.append(leaf.to(wire))
        out = torch.empty(unit.layout.padded)
        tree_sum(out, leaves, scale=scale)
        found.append(out)
    return found


def check(mesh, store, whole):
    for unit, found, wanted in zip(store.table.units, collect(mesh, store), whole, strict=True):
        for entry in unit.layout.entries:
            assert torch.equal(found[entry.span.slice], wanted[entry.span.slice]), (unit.name, entry.name)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("row", sorted(ROWS))
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_one_sum_over_all_slots(size, row, wire):
    if row == "nested" and size not in (4, 6):
        return
    slots = Slots(12, size, row not in ("whole", "whole to cut"))

    def work(world):
        mesh = mesh_of(world, inner=2 if row == "nested" else 0)
        store = store_of(mesh, row, slots, wire=wire, is_overlapped=wire == torch.bfloat16)
        for _ in range(2):  # nothing of the last update may be left
            run(store, slots, world.rank)
            check(mesh, store, expected(store.table, range(12), wire, 1 / 12))
            store.clear()
        assert store.shards.arena.taken_count == 0

    sim.run(size, work)


@pytest.mark.parametrize("count", [1, 5, 7, 8])
@pytest.mark.parametrize("row", ["whole", "whole to cut", "cut"])
def test_any_number_of_slots(count, row):
    for size in (n for n in (1, 5, 7, 8) if count % n == 0):
        slots = Slots(count, size, row == "cut")

        def work(world, slots=slots):
            mesh = mesh_of(world)
            store = store_of(mesh, row, slots)
            run(store, slots, world.rank)
            check(mesh, store, expected(store.table, range(count), torch.float32, 1 / count))

        sim.run(size, work)


@pytest.mark.parametrize("row", ["whole", "cut"])
def test_narrow_accumulators_round_the_root_once(row):
    slots = Slots(6, 2, row == "cut")

    def work(world):
        mesh = mesh_of(world)
        store = store_of(mesh, row, slots, accumulate=torch.bfloat16)
        run(store, slots, world.rank)
        whole = expected(store.table, range(6), torch.float32, 1 / 6)
        check(mesh, store, [values.bfloat16().float() for values in whole])

    sim.run(2, work)


@pytest.mark.parametrize("row", ["whole", "whole to cut", "cut"])
@pytest.mark.parametrize(("ranks", "together", "sequence"), [(2, 1, 2), (2, 2, 1), (4, 2, 1), (1, 1, 3), (2, 2, 2)])
def test_ranks_that_share_slots_have_lanes(row, ranks, together, sequence):
    slots = Slots(4, ranks, row == "cut", together, sequence)
    names = [None] * slots.leaves
    for rank in range(ranks):
        for step in range(slots.per_rank):
            for part in range(sequence):
                names[slots.leaf(rank, step, part)] = slots.slot(rank, step) + 1000 * part

    def work(world):
        mesh = mesh_of(world)
        store = store_of(mesh, row, slots)
        run(store, slots, *divmod(world.rank, sequence))
        check(mesh, store, expected(store.table, names, torch.float32, 1 / (4 * sequence)))

    sim.run(ranks * sequence, work)


@pytest.mark.parametrize("row", ["whole", "whole to cut"])
def test_slots_that_never_came_are_zeros(row):
    """A rank without passes does not keep the others waiting; absent parameters are zeros."""
    slots = Slots(6, 3, False)

    def work(world):
        mesh = mesh_of(world)
        store = store_of(mesh, row, slots)
        run(store, slots, world.rank, steps=0 if world.rank == 1 else 1)
        names = [0, None, None, None, 4, None]
        check(mesh, store, expected(store.table, names, torch.float32, 1 / 6))

    sim.run(3, work)


@pytest.mark.parametrize("row", ["whole", "cut"])
def test_more_passes_than_slots_are_refused(row):
    slots = Slots(2, 1, row == "cut")

    def work(world):
        store = store_of(mesh_of(world), row, slots)
        for _ in range(2):
            store.begin_backward(reduces=False)
            store.end_backward()
        with pytest.raises(UsageError, match="an update has 2 backward passes"):
            store.begin_backward(reduces=False)
        store.finish()
        with pytest.raises(UsageError, match="sums of this update are complete"):
            store.begin_backward(reduces=False)
        store.clear()
        run(store, slots, 0)

    sim.run(1, work)


def test_a_sum_that_is_dropped_gives_its_buffers_back():
    slots = Slots(8, 2, False)

    def work(world):
        store = store_of(mesh_of(world), "whole", slots)
        run_partly = 3
        for step in range(run_partly):
            store.begin_backward(reduces=False)
            land(store, slots.slot(world.rank, step))
            store.end_backward()
        assert store.exchange.held_bytes > 0
        store.clear()
        assert store.shards.arena.taken_count == 0
        run(store, slots, world.rank)

    sim.run(2, work)


def test_sums_are_not_rounded_on_their_way():
    """Of 2 + 2**-7 * 3 in bf16 messages each sum of neighbours would lose the small parts."""
    slots = Slots(4, 2, False)
    values = [2.0, 2.0**-7, 2.0**-7, 2.0**-7]

    def work(world):
        mesh = mesh_of(world)
        for row in ("whole", "cut"):
            turned = Slots(4, 2, row == "cut")
            store = store_of(mesh, row, turned, wire=torch.bfloat16)
            for step in range(2):
                store.begin_backward(reduces=step == 1)
                for unit in store.table.units:
                    for entry in unit.layout.entries:
                        store.land(unit, entry, torch.full(entry.shape, values[turned.slot(world.rank, step)]))
                store.end_backward()
            store.finish()
            for unit, found in zip(store.table.units, collect(mesh, store), strict=True):
                for entry in unit.layout.entries:
                    assert set(found[entry.span.slice].tolist()) == {sum(values) / 4}

    sim.run(slots.ranks, work)
