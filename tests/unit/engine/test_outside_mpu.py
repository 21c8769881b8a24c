"""Axes read from mpu objects of other libraries, on simulated ranks."""

import pytest
import torch

from mpispeed.base.errors import ConfigError
from mpispeed.mesh import Topology, sim
from mpispeed.mesh.foreign_groups import ranks_of
from mpispeed.pipe import PipelineParallelGrid, PipeModelDataParallelTopology
from mpispeed.plan.mpu import axes_of

MEGATRON = {"pipe": "pipeline_model_parallel", "data": "data_parallel", "model": "tensor_model_parallel"}
OLD_MEGATRON = {"data": "data_parallel", "model": "model_parallel"}
DEEPSPEED = {"pipe": "pipe_parallel", "data": "data_parallel", "model": "slice_parallel"}


class Holder:
    def __init__(self, ranks):
        self.ranks = ranks


class Mpu:
    """The getters `names` of a grid, as another library would have them."""

    def __init__(self, axes, rank, names, wrap=list):
        grid = Topology(axes)
        for axis, name in names.items():
            along = axis if axis in axes else ()
            ranks = wrap(list(grid.peers(rank, along)))
            self.add(name, grid.index(rank, along), grid.group_size(along), ranks)

    def add(self, name, rank, size, group):
        setattr(self, f"get_{name}_rank", lambda: rank)
        setattr(self, f"get_{name}_world_size", lambda: size)
        setattr(self, f"get_{name}_group", lambda: group)


def found(axes, names, size, wrap=list, change=None):
    def fn(world):
        mpu = Mpu(axes, world.rank, names, wrap)
        if change is not None:
            change(mpu, world.rank)
        return axes_of(mpu, world)

    (first, *others) = sim.run(size, fn)
    assert all(list(other.items()) == list(first.items()) for other in others)
    return {axis: size for axis, size in first.items() if size > 1}


@pytest.mark.parametrize(
    "axes",
    [
        {"pipe": 2, "data": 2, "model": 2},
        {"data": 2, "pipe": 2, "model": 2},
        {"pipe": 2, "model": 2, "data": 2},
        {"model": 2, "data": 3, "pipe": 2},
        {"data": 2, "model": 3, "pipe": 1},
        {"pipe": 1, "data": 1, "model": 1},
    ],
)
@pytest.mark.parametrize("names", [MEGATRON, DEEPSPEED])
@pytest.mark.parametrize("wrap", [list, tuple, Holder, torch.tensor])
def test_any_order_of_axes(axes, names, wrap):
    wanted = {axis: size for axis, size in axes.items() if size > 1}
    read = found(axes, names, Topology(axes).size, wrap)
    assert list(read.items()) == list(wanted.items())


def test_without_stages():
    assert list(found({"data": 2, "model": 2}, OLD_MEGATRON, 4).items()) == [("data", 2), ("model", 2)]
    assert list(found({"model": 2, "data": 3}, OLD_MEGATRON, 6).items()) == [("model", 2), ("data", 3)]


def test_groups_that_do_not_tell_their_ranks():
    """Then positions alone decide."""
    read = found({"model": 2, "data": 3}, MEGATRON, 6, wrap=lambda _: object())
    assert list(read.items()) == [("model", 2), ("data", 3)]


@pytest.mark.parametrize("slices", [1, 2])
def test_a_model_group_that_spans_stages_and_slices(slices):
    axes = {"pipe": 2, "data": 2, "model": slices}

    def change(mpu, rank):
        grid = Topology(axes)
        joint = ("pipe", "model")
        mpu.add("model_parallel", grid.index(rank, joint), 2 * slices, list(grid.peers(rank, joint)))

    names = {"pipe": "pipe_parallel", "data": "data_parallel"}
    assert found(axes, names, 4 * slices, change=change) == {axis: size for axis, size in axes.items() if size > 1}


def test_our_own_grid_is_an_mpu():
    def fn(world):
        return axes_of(PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2), world), world)

    assert sim.run(8, fn) == [{"pipe": 2, "data": 2, "model": 2}] * 8


ULYSSES = {"sequence": "sequence_parallel"}
CONTEXT = {"data": "data_parallel", "sequence": "context_parallel", "model": "tensor_model_parallel"}


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({"pipe": 2, "data": 2, "sequence": 2, "model": 1}, {**DEEPSPEED, **ULYSSES}),
        ({"data": 2, "sequence": 3}, ULYSSES),
        ({"data": 1, "sequence": 3}, ULYSSES),
        ({"data": 2, "sequence": 2, "model": 2}, CONTEXT),
        ({"model": 2, "data": 2, "sequence": 2}, CONTEXT),
    ],
)
@pytest.mark.parametrize("more", ["", "with both", "data spans sequences"])
def test_ranks_that_share_sequences(axes, names, more):
    def change(mpu, rank):
        grid, both = Topology(axes), ("data", "sequence")
        told = grid.index(rank, both), grid.group_size(both), list(grid.peers(rank, both))
        if more:
            mpu.add("sequence_data_parallel" if more == "with both" else "data_parallel", *told)

    expected = {**axes, "data": axes["data"] * axes["sequence"], "sequence": axes["sequence"]}
    read = found(axes, names, Topology(axes).size, change=change)
    assert read == {axis: size for axis, size in expected.items() if size > 1}
    is_first = [axis for axis in axes if axis != "sequence" and expected[axis] > 1]
    assert [axis for axis in read if axis != "sequence"] == is_first


def test_sequences_whose_ranks_are_apart():
    axes = {"sequence": 2, "data": 2}
    refused(lambda mpu, rank: None, "fit no grid", axes=axes, names={**ULYSSES, "data": "data_parallel"})
    both = lambda mpu, rank: mpu.add("sequence_data_parallel", 0, 3, [0, 1, 2])  # noqa: E731
    refused(both, "data=1 x sequence=2 x model=1 make 2 ranks, the job has 4", axes=axes, names=ULYSSES)


def refused(change, text, axes=None, names=MEGATRON, size=4):
    """Every rank raises."""

    def fn(world):
        mpu = Mpu(axes or {"data": 2, "model": 2}, world.rank, names)
        change(mpu, world.rank)
        with pytest.raises(ConfigError, match=text):
            axes_of(mpu, world)
        return True

    assert sim.run(size, fn) == [True] * size


def test_groups_that_are_no_grid():
    groups = [[0, 3], [1, 2], [1, 2], [0, 3]]

    def change(mpu, rank):
        mpu.add("data_parallel", groups[rank].index(rank), 2, groups[rank])

    refused(
        change, r"fit no grid of the axes pipe=1 x data=2 x model=2, in no order.*rank \d would be in the data group"
    )


def test_positions_that_contradict_the_groups():
    def change(mpu, rank):
        mpu.add("data_parallel", 0, 2, mpu.get_data_parallel_group())

    refused(change, "rank . would be at 1 of data, the mpu says 0")


def test_sizes_that_do_not_fit():
    def change(mpu, rank):
        mpu.add("pipeline_model_parallel", 0, 2, [rank, 7])

    refused(change, "pipe=2 x data=2 x model=2 make 8 ranks, the job has 4")


def test_sizes_that_differ_between_ranks():
    def change(mpu, rank):
        if rank == 3:
            mpu.add("data_parallel", 0, 1, [3])
            mpu.add("tensor_model_parallel", 3, 4, [0, 1, 2, 3])

    refused(change, "rank 3 has the axes pipe=1 x data=1 x model=4, rank 0 has pipe=1 x data=2 x model=2")


def test_a_position_outside_of_its_axis():
    refused(lambda mpu, rank: mpu.add("data_parallel", 2, 2, None), "is at 2 of 2 on the axis data")


def test_an_error_on_one_rank_reaches_all():
    def change(mpu, rank):
        def fail():
            raise KeyError(rank)

        if rank == 2:
            mpu.get_data_parallel_group = fail

    refused(change, "rank 2 of 4: mpu: KeyError: 2")


def test_methods_that_are_missing():
    refused(lambda mpu, rank: None, "has no method get_data_parallel_world_size", names={"model": "model_parallel"})
    refused(lambda mpu, rank: delattr(mpu, "get_data_parallel_rank"), "has no method get_data_parallel_rank")


def test_ranks_of_other_objects():
    assert ranks_of(range(2)) == [0, 1]
    assert ranks_of(Holder((3, 4))) == [3, 4]
    assert ranks_of(None) is None
    assert ranks_of("01") is None
    assert ranks_of([object()]) is None
    assert ranks_of(object()) is None
