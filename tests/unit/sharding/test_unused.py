"""`ignore_unused_parameters: false`: a parameter without a gradient is an error on every rank."""

import pytest

from mpispeed.base.errors import UsageError
from mpispeed.mesh import sim
from tests.helpers.stores import DATA, INNER, WHOLE, backward, mesh_of, store_of

ROWS = {"whole": (WHOLE, WHOLE, 0), "to cut": (WHOLE, DATA, 0), "cut": (DATA, DATA, 0), "inner": (INNER, INNER, 2)}


@pytest.mark.parametrize("row", sorted(ROWS))
@pytest.mark.parametrize("overlap", [False, True])
def test_every_rank_hears_of_a_gradient_that_one_rank_misses(row, overlap):
    rest, target, inner = ROWS[row]

    def work(world):
        mesh = mesh_of(world, inner)
        store = store_of(mesh, rest, target, requires_all=True, is_overlapped=overlap)
        skip = ("1.weight", "2.bias") if world.rank == 3 else ()
        backward(store, world.rank, 0, reduces=True, skip=skip)
        with pytest.raises(UsageError, match=r"rank 3 of 4: .*1\.weight, 2\.bias.*ignore_unused_parameters is false"):
            store.finish()
        store.clear()
        backward(store, world.rank, 0, reduces=False, skip=("1.weight",))
        backward(store, world.rank, 1, reduces=True, skip=("2.bias",))
        store.finish()  # each had one in some micro-step
        store.clear()
        backward(store, world.rank, 0, reduces=True, skip=("0.bias",))  # what came before the clear does not count
        with pytest.raises(UsageError, match=r"0\.bias"):
            store.finish()
        mesh.close()

    sim.run(4, work)


def test_without_the_demand_nothing_is_said_or_sent():
    def work(world):
        mesh = mesh_of(world)
        store = store_of(mesh, DATA)
        backward(store, world.rank, 0, reduces=True, skip=("1.weight",))
        store.finish()
        assert not [verb for verb, _ in mesh.comm_trace.entries() if verb == "agree"]
        mesh.close()

    sim.run(2, work)
