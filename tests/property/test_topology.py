"""Topologies of any shape: rank and coordinates are inverse, groups partition the ranks, nothing grows with them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import TopologyError
from mpispeed.mesh import Factor, Topology

NAMES = ("pipe", "data", "expert", "model")


@st.composite
def topologies(draw):
    count = draw(st.integers(0, 4))
    sizes = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    return Topology(dict(zip(NAMES, sizes, strict=False)))


@given(topologies(), st.data())
def test_rank_and_coords_are_inverse(topology, data):
    rank = data.draw(st.integers(0, topology.size - 1))
    coords = topology.coords(rank)
    assert topology.rank(**coords) == rank
    assert list(coords) == list(topology.names)
    for name, at in coords.items():
        assert topology.index(rank, name) == at


@given(topologies())
def test_rank_order_is_row_major(topology):
    order = [tuple(topology.coords(rank).values()) for rank in range(topology.size)]
    assert order == sorted(order)


@given(topologies(), st.data())
def test_groups_partition_the_ranks(topology, data):
    axes = data.draw(st.lists(st.sampled_from(topology.names), unique=True)) if topology.names else []
    groups = [list(group) for group in topology.groups(axes)]
    assert sorted(rank for group in groups for rank in group) == list(range(topology.size))
    for group in groups:
        assert len(group) == topology.group_size(axes)
        assert group == sorted(group)
        for position, rank in enumerate(group):
            assert list(topology.peers(rank, axes)) == group
            assert topology.index(rank, axes) == position
            assert topology.peers(rank, axes)[position] == rank


@given(topologies(), st.data())
def test_match_is_a_filter(topology, data):
    chosen = data.draw(st.lists(st.sampled_from(topology.names), unique=True)) if topology.names else []
    wanted = {name: data.draw(st.integers(0, 4)) for name in chosen}
    by_hand = [r for r in range(topology.size) if all(topology.coords(r)[n] == at for n, at in wanted.items())]
    assert list(topology.match(**wanted)) == by_hand


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_factors_nest(inner, middle, outer, pipe):
    size = inner * middle * outer
    topology = Topology.factored(
        {"pipe": pipe, "data": size},
        {"data": [Factor("shard", inner * middle, "shard_size", rest="replica"), Factor("expert", inner, "experts")]},
    )
    assert topology.size == pipe * size
    assert topology.group_size("data") == size
    assert topology.group_size("shard") == inner * middle
    assert topology.group_size("replica") == outer
    assert topology.group_size("expert") == inner
    for rank in range(topology.size):
        first = rank // size * size
        assert list(topology.peers(rank, "data")) == list(range(first, first + size))
        start = rank // (inner * middle) * inner * middle
        assert list(topology.peers(rank, "shard")) == list(range(start, start + inner * middle))
        assert topology.index(rank, "expert") == rank % inner
        assert topology.index(rank, "replica") == (rank - first) // (inner * middle)


@given(st.integers(2, 12), st.integers(2, 12), st.integers(1, 6))
def test_sizes_that_do_not_nest_are_refused_with_both_settings(small, large, times):
    factors = {"data": [Factor("shard", small, "mics_shard_size"), Factor("expert", large, "ep_size")]}
    size = math.lcm(small, large) * times
    low, high = sorted((small, large))
    if high % low == 0:
        assert Topology.factored({"data": size}, factors).group_size("shard") == small
    else:
        with pytest.raises(TopologyError, match=r"mics_shard_size.*ep_size|ep_size.*mics_shard_size"):
            Topology.factored({"data": size}, factors)
