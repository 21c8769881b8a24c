"""Grids on simulated ranks: coordinates, groups, neighbours, what is refused."""

import pytest
import torch

from mpispeed.base.errors import TopologyError
from mpispeed.mesh import Topology, sim
from mpispeed.pipe import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

GROUPS = ("pipe_parallel", "data_parallel", "model_parallel", "slice_parallel", "tensor_model_parallel")


def facts_of(topology, size):
    """For each rank: rank, size and members of each group, and whether a sum over it is that of its members."""

    def fn(world):
        grid = PipelineParallelGrid(topology, world)
        facts = {"global": grid.get_global_rank(), "stage": grid.stage_id, "data": grid.data_parallel_id}
        facts["ends"] = (grid.is_first_stage, grid.is_last_stage)
        for name in GROUPS:
            group = getattr(grid, f"get_{name}_group")()
            x = torch.tensor([float(world.rank)])
            group.all_reduce(x)
            rank, count = getattr(grid, f"get_{name}_rank")(), getattr(grid, f"get_{name}_world_size")()
            assert (group.rank, group.size, x.item()) == (rank, count, sum(group.ranks))
            facts[name] = (rank, count, list(group.ranks))
        assert (grid.get_stage_id(), grid.get_data_parallel_id()) == (grid.stage_id, grid.data_parallel_id)
        facts["lists"] = (grid.pp_group, grid.dp_group, grid.slice_group)
        facts["p2p"] = grid.p2p_groups
        facts["dims"] = dict(zip(grid.topology().axes, grid.topology().dims, strict=True))
        grid.close()
        return facts

    return sim.run(size, fn)


def test_two_by_two():
    facts = facts_of(PipeDataParallelTopology(2, 2), 4)
    assert [fact["lists"][0] for fact in facts] == [[0, 2], [1, 3]] * 2
    assert [fact["lists"][1] for fact in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [fact["stage"] for fact in facts] == [0, 0, 1, 1]
    assert [fact["data"] for fact in facts] == [0, 1, 0, 1]
    assert [fact["ends"] for fact in facts] == [(True, False)] * 2 + [(False, True)] * 2
    assert [fact["slice_parallel"] for fact in facts] == [(0, 1, [rank]) for rank in range(4)]
    assert facts[0]["p2p"] == [[0, 2], [1, 3], [2, 0], [3, 1]]


def test_three_axes():
    facts = facts_of(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2), 8)
    assert facts[5]["pipe_parallel"] == (1, 2, [1, 5])
    assert facts[5]["data_parallel"] == (0, 2, [5, 7])
    assert facts[5]["slice_parallel"] == facts[5]["tensor_model_parallel"] == (1, 2, [4, 5])
    assert facts[5]["model_parallel"] == (3, 4, [0, 1, 4, 5])
    assert facts[6]["model_parallel"] == (2, 4, [2, 3, 6, 7])


@pytest.mark.parametrize(
    ("size", "pipe", "data"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2), (6, 2, 3), (8, 4, 2), (12, 6, 2)]
)
def test_default_topology_deals_prime_factors(size, pipe, data):
    facts = facts_of(None, size)
    assert facts[0]["dims"] == {"pipe": pipe, "data": data}
    assert facts[-1]["stage"] == pipe - 1


def test_other_orders_and_missing_axes():
    facts = facts_of(ProcessTopology(["data", "pipe"], [2, 2]), 4)
    assert [fact["lists"][0] for fact in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    facts = facts_of(Topology({"model": 3}), 3)
    assert facts[1]["slice_parallel"] == (1, 3, [0, 1, 2])
    assert facts[1]["ends"] == (True, True)
    assert facts[1]["pipe_parallel"] == facts[1]["data_parallel"] == (0, 1, [1])


def test_stage_to_global():
    def fn(world):
        grid = PipelineParallelGrid(PipeDataParallelTopology(2, 2), world)
        kept, given = grid.stage_to_global(stage_id=1), grid.stage_to_global(stage_id=1, data=0)
        with pytest.raises(TopologyError, match="pipe=2 is outside"):
            grid.stage_to_global(2)
        return kept, given

    assert sim.run(4, fn) == [(2, 2), (3, 2), (2, 2), (3, 2)]


def test_groups_of_stages():
    def fn(world):
        grid = PipelineParallelGrid(PipeDataParallelTopology(3, 2), world)
        ends = grid.group_of_stages((2, 0), "ends")
        again = grid.group_of_stages([0, 2], "ends again")
        everyone = grid.group_of_stages([0, 1, 2], "all")
        total = torch.tensor([float(world.rank)])
        if ends is not None:
            assert again is ends
            ends.start_all_reduce(total).wait()
        everyone.all_reduce(total, "max")
        with pytest.raises(TopologyError, match=r"stages out of 0\.\.2"):
            grid.group_of_stages([0, 3], "wrong")
        grid.close()
        return ends and list(ends.ranks), total.item()

    assert sim.run(6, fn) == [([0, 4], 4.0), ([1, 5], 6.0), (None, 4.0), (None, 6.0), ([0, 4], 4.0), ([1, 5], 6.0)]


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (PipeDataParallelTopology(2, 2), "invalid grid: axes pipe=2 x data=2: they make 4 ranks"),
        (ProcessTopology(["pipe", "expert"], [1, 2]), r"unknown axes \['expert'\]"),
        ({"pipe": 2}, "topology is a dict; pass a ProcessTopology"),
    ],
)
def test_what_is_refused(topology, text):
    with pytest.raises(TopologyError, match=text) as raised:
        sim.run(2, lambda world: PipelineParallelGrid(topology, world))
    assert isinstance(raised.value, AssertionError)
    with pytest.raises(TopologyError, match="process_group is a list"):
        PipelineParallelGrid(None, [0, 1])
