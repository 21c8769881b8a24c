"""MPI ranks that start different things are told so; nothing hangs."""

import pytest
import torch

from mpispeed.base.errors import CommError
from tests.helpers import diverge

pytestmark = pytest.mark.mpi(min_size=2)

SCENARIOS = (
    diverge.different_labels,
    diverge.extra_operation,
    diverge.different_sizes,
    diverge.equal_texts,
    diverge.cross_lane,
    diverge.stale_round,
    diverge.left_behind,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda fn: fn.__name__)
def test_divergence(scenario, world):
    scenario(world)


def test_slow_rank(world, caplog, monkeypatch):
    seen = world.comm.gather_objects(diverge.slow_rank(world, caplog, monkeypatch))
    assert sum(map(len, seen)) == world.node_count


@pytest.mark.parametrize("sent", [1, 3])
def test_messages_of_other_lengths_are_no_results(world, sent):
    """The last rank waits for 2 elements of its neighbour, which sends fewer or more."""
    comm, last = world.comm.duplicate(), world.size - 1
    counts, out_counts = [0] * world.size, [0] * world.size
    if comm.rank == last - 1:
        counts[last] = sent
    if comm.rank == last:
        out_counts[last - 1] = 2
        with pytest.raises(CommError, match="not as long as this rank waits for: the ranks are at different calls"):
            comm.all_to_all(torch.zeros(2), torch.zeros(0), out_counts, counts)
    else:
        comm.all_to_all(torch.zeros(0), torch.zeros(sum(counts)), out_counts, counts)
