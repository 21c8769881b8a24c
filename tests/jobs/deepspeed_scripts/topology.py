"""Coordinates of ranks, as in the documented examples."""

from deepspeed.runtime.pipe import ProcessTopology
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

plane = ProcessTopology(axes=["x", "y"], dims=[2, 3])
assert plane.get_rank(x=0, y=1) == 1
assert plane.get_dim("y") == 3
assert plane.get_coord(rank=1).x == 0
assert plane.get_coord(rank=1).y == 1
assert plane.get_axis_list(axis="x", idx=0) == [0, 1, 2]
assert plane.get_axis_list(axis="y", idx=0) == [0, 3]

square = ProcessTopology(axes=["a", "b"], dims=[2, 2])
assert square.get_axis_names() == ["a", "b"]
assert square.get_rank_repr(rank=3) == "a_01-b_01"
assert square.get_rank_repr(rank=3, omit_axes=["a"]) == "b_01"

cube = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
assert cube.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
assert cube.filter_match(pipe=0, data=1) == [2, 3]
found = [cube.get_coord(rank) for rank in cube.filter_match(pipe=0, data=1)]
assert [(each.pipe, each.data, each.model) for each in found] == [(0, 1, 0), (0, 1, 1)]
assert PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2).world_size() == 8
