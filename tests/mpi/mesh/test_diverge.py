"""MPI ranks that start different things are told so; nothing hangs."""

import pytest

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
