"""Process topologies: every member, with the values of DeepSpeed's documentation and tests."""

import math

import pytest

from mpispeed.base.errors import TopologyError
from mpispeed.pipe import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from mpispeed.pipe.process_topology import _prime_factors


def test_two_axes_of_different_sizes():
    topo = ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert topo.get_rank(x=0, y=1) == 1
    assert (topo.get_dim("x"), topo.get_dim("y")) == (2, 3)
    assert topo.get_coord(1) == topo.ProcessCoord(x=0, y=1)
    assert topo.get_coord(1).y == 1
    assert topo.get_axis_list("x", 0) == [0, 1, 2]
    assert topo.get_axis_list("y", 0) == [0, 3]
    assert topo.get_axis_names() == topo.axes == ["x", "y"]
    assert topo.dims == [2, 3]


def test_two_by_two():
    topo = ProcessTopology(axes=["row", "col"], dims=[2, 2])
    assert [topo.get_rank(row=r, col=c) for r in range(2) for c in range(2)] == [0, 1, 2, 3]
    assert [topo.get_axis_list("row", i) for i in range(2)] == [[0, 1], [2, 3]]
    assert [topo.get_axis_list("col", i) for i in range(2)] == [[0, 2], [1, 3]]


def test_mapping_is_in_the_order_of_ranks():
    topo = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert list(topo.mapping.items()) == [(topo.ProcessCoord(a, b), 2 * a + b) for a in range(2) for b in range(2)]
    assert str(topo) == str(topo.mapping)
    assert topo.ProcessCoord._fields == ("a", "b")


def test_text_of_ranks():
    topo = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert [topo.get_rank_repr(rank) for rank in (0, 3)] == ["a_00-b_00", "a_01-b_01"]
    assert topo.get_rank_repr(3, omit_axes=["a"]) == "b_01"
    assert topo.get_rank_repr(3, omit_axes=["b"]) == "a_01"
    assert topo.get_rank_repr(3, omit_axes=["a", "b"]) == ""
    assert topo.get_rank_repr(3, inner_sep="+") == "a+01-b+01"
    assert topo.get_rank_repr(3, inner_sep="🤗", outer_sep="_JEFF_") == "a🤗01_JEFF_b🤗01"
    assert topo.get_rank_repr(3, inner_sep="+", outer_sep="") == "a+01b+01"


def test_text_of_ranks_leaves_out_data_and_pipe():
    topo = PipeDataParallelTopology(num_pp=2, num_dp=2)
    assert [topo.get_rank_repr(rank) for rank in range(4)] == [""] * 4
    assert [topo.get_rank_repr(rank, omit_axes=["pipe"]) for rank in range(4)] == ["data_00", "data_01"] * 2
    assert topo.get_rank_repr(2, omit_axes=[]) == "pipe_01-data_00"


def test_three_axes():
    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topo.axes == ["pipe", "data", "model"]
    assert [topo.get_rank_repr(rank) for rank in range(8)] == ["model_00", "model_01"] * 4
    assert topo.filter_match(pipe=0, data=1) == [2, 3]
    assert topo.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topo.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topo.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topo.get_axis_comm_lists("jeff") == []


def test_arguments_of_the_three_axes_are_in_another_order_than_the_axes():
    assert PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4).dims == [2, 4, 3]
    assert PipeDataParallelTopology(2, 3).dims == [2, 3]


def test_matches():
    topo = ProcessTopology(axes=["a", "b", "c"], dims=[2, 2, 2])
    assert topo.get_axis_list("b", 0) == [0, 1, 4, 5]
    assert topo.get_axis_list("c", 1) == [1, 3, 5, 7]
    assert topo.filter_match(b=1, c=1) == [3, 7]
    assert topo.filter_match(b=2) == []
    assert topo.filter_match() == list(range(8))


def test_world_size():
    assert ProcessTopology(axes=["a", "b", "c"], dims=[2, 3, 4]).world_size() == 24


def test_an_axis_of_one():
    topo = ProcessTopology(axes=["pipe", "data"], dims=[1, 3])
    assert topo.get_axis_comm_lists("pipe") == [[0], [1], [2]]
    assert topo.get_axis_comm_lists("data") == [[0, 1, 2]]


def test_unknown_axis_has_size_zero():
    assert ProcessTopology(["a"], [2]).get_dim("b") == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda topo: topo.get_rank(a=0), ValueError),
        (lambda topo: topo.get_rank(a=0, b=0, c=0), ValueError),
        (lambda topo: topo.get_rank(a=0, b=5), AssertionError),
        (lambda topo: topo.get_coord(4), ValueError),
        (lambda topo: topo.get_coord(-1), ValueError),
        (lambda topo: topo.filter_match(c=0), AttributeError),
        (lambda topo: topo.get_axis_list("c", 0), ValueError),
        (lambda _: ProcessTopology(["a", "a"], [2, 2]), TopologyError),
        (lambda _: ProcessTopology(["a"], [2, 2]), TopologyError),
        (lambda _: ProcessTopology(["a"], [0]), TopologyError),
        (lambda _: ProcessTopology(["no name"], [2]), TopologyError),
    ],
)
def test_what_is_refused(call, error):
    topo = ProcessTopology(["a", "b"], [2, 2])
    with pytest.raises(error) as raised:
        call(topo)
    assert isinstance(raised.value, TopologyError)


def test_the_error_of_a_part_of_a_coordinate_names_what_to_use():
    with pytest.raises(ValueError, match="filter_match"):
        ProcessTopology(["a", "b"], [2, 2]).get_rank(a=0)


def test_prime_factors():
    assert _prime_factors(1) == []
    assert _prime_factors(12) == [2, 2, 3]
    for number in range(1, 300):
        factors = _prime_factors(number)
        assert math.prod(factors) == number
        assert factors == sorted(factors)
        assert all(factor % divisor for factor in factors for divisor in range(2, factor))
    for number in (0, -1):
        with pytest.raises(ValueError, match="prime factors"):
            _prime_factors(number)
