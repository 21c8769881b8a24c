"""Topology by example: the published numberings, names, refusals, size."""

import sys

import pytest

from mpispeed.base.errors import ConfigError, TopologyError
from mpispeed.mesh import Factor, Topology


def test_two_by_three():
    topology = Topology({"x": 2, "y": 3})
    assert topology.rank(x=0, y=1) == 1
    assert topology.coords(1) == {"x": 0, "y": 1}
    assert list(topology.match(x=0)) == [0, 1, 2]
    assert list(topology.match(y=0)) == [0, 3]
    assert topology.size == 6


def test_cube_of_pipe_data_model():
    topology = Topology({"pipe": 2, "data": 2, "model": 2})
    assert [list(g) for g in topology.groups("pipe")] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [list(g) for g in topology.groups("data")] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [list(g) for g in topology.groups("model")] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(topology.match(pipe=0, data=1)) == [2, 3]
    assert list(topology.peers(5, ("pipe", "model"))) == [0, 1, 4, 5]
    assert list(topology.peers(5, ("model", "pipe"))) == [0, 1, 4, 5]
    assert topology.index(5, ("pipe", "model")) == 3
    assert list(topology.peers(5, ())) == [5]
    assert topology.group_size(()) == 1


def test_aliases_stand_for_fine_axes():
    topology = Topology({"outer": 2, "inner": 2, "model": 2}, aliases={"data": ("outer", "inner")})
    assert topology.resolve("data") == ("outer", "inner")
    assert topology.resolve(("model", "data")) == ("outer", "inner", "model")
    assert list(topology.peers(3, "data")) == [1, 3, 5, 7]
    assert topology.index(7, "data") == 3
    assert topology.has("data")
    assert not topology.has("expert")


def test_axis_of_size_one_and_no_axes():
    topology = Topology({"pipe": 1, "data": 4, "model": 1})
    assert list(topology.peers(2, "pipe")) == [2]
    assert list(topology.peers(2, ("pipe", "data", "model"))) == [0, 1, 2, 3]
    assert Topology({}).size == 1
    assert Topology({}).coords(0) == {}


@pytest.mark.parametrize(
    ("axes", "aliases", "words"),
    [
        ({"data": 0}, {}, "axis 'data' has size 0"),
        ({"data": True}, {}, "size True"),
        ({"data": 2}, {"data": ("data",)}, "alias 'data'"),
        ({"data": 2}, {"all": ("data", "pipe")}, "alias 'all'"),
        ({"data": 2}, {"all": ("data", "data")}, "each of its fine axes once"),
    ],
)
def test_refused_shapes(axes, aliases, words):
    with pytest.raises(TopologyError, match=words):
        Topology(axes, aliases)


def test_refused_questions():
    topology = Topology({"pipe": 2, "data": 2})
    with pytest.raises(TopologyError, match="unknown axis 'model'; this topology has: pipe, data"):
        topology.peers(0, "model")
    with pytest.raises(TopologyError, match="rank 4 is outside"):
        topology.coords(4)
    with pytest.raises(TopologyError, match="one coordinate for each"):
        topology.rank(pipe=1)
    with pytest.raises(TopologyError, match="data=2 is outside"):
        topology.rank(pipe=1, data=2)
    with pytest.raises(TopologyError, match="unknown fine axis"):
        topology.match(model=0)
    assert list(topology.match(data=7)) == []
    with pytest.raises(IndexError):
        topology.peers(0, "data")[2]


def test_sizes_that_do_not_divide_name_both_settings():
    with pytest.raises(
        ConfigError, match=r"size of axis 'data' = 16 is not a multiple of mics_shard_size = 6"
    ) as error:
        Topology.factored({"data": 16}, {"data": [Factor("data.inner", 6, "mics_shard_size")]})
    assert str(error.value).endswith("16 is divided by 1, 2, 4, 8, 16")


def test_factor_of_the_whole_axis_or_of_one():
    topology = Topology.factored({"data": 4}, {"data": [Factor("in", 4, "a", rest="out"), Factor("one", 1, "b")]})
    assert (topology.group_size("in"), topology.group_size("out"), topology.group_size("one")) == (4, 1, 1)
    alone = Topology.factored({"data": 1, "model": 2}, {"data": [Factor("in", 1, "a")]})
    assert (alone.size, alone.group_size("data"), alone.index(1, "data")) == (2, 1, 0)


def test_many_ranks_cost_nothing():
    topology = Topology({"pipe": 10, "outer": 25, "inner": 40, "model": 10}, aliases={"data": ("outer", "inner")})
    assert topology.size == 100_000
    rank = 54_321
    peers = topology.peers(rank, ("pipe", "inner"))
    assert len(peers) == 400
    assert peers[topology.index(rank, ("pipe", "inner"))] == rank
    assert rank in peers
    assert [peers.index(other) for other in peers] == list(range(400))
    others = set(range(rank - 5000, rank + 5000)) - set(peers)
    for other in (-1, topology.size, *list(others)[::50]):
        with pytest.raises(ValueError, match=f"rank {other} is not among"):
            peers.index(other)
    assert len(peers[:3]) == 3
    assert peers[-1] == max(peers[-5:])
    assert isinstance(topology.peers(rank, "data"), range)
    assert sys.getsizeof(peers) < 200
    assert "..." in repr(peers)


def test_topologies_are_values():
    first, second = Topology({"data": 2}), Topology({"data": 2})
    assert first == second
    assert hash(first) == hash(second)
    assert first != Topology({"pipe": 2})
    with pytest.raises(AttributeError):
        first.size = 3
    assert str(Topology({"pipe": 2, "data": 3})) == "pipe=2 x data=3"
