"""Grids, tied weights and seeds of pipelines over MPI, at any number of ranks."""

import math

import pytest
import torch
from torch import nn

from mpispeed.base.errors import StageError, TopologyError
from mpispeed.mesh.foreign_groups import ranks_of
from mpispeed.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
)
from mpispeed.pipe.process_topology import _prime_factors
from mpispeed.plan.mpu import axes_of

pytestmark = pytest.mark.mpi(min_size=1)


def topologies(size):
    """All sizes of pipe, data and model that make `size` ranks."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    for pipe in divisors:
        for model in divisors:
            if size % (pipe * model) == 0:
                yield PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=size // pipe // model)


def test_groups_are_those_of_the_topology(world):
    for topology in topologies(world.size):
        grid = PipelineParallelGrid(topology)
        at = topology.get_coord(world.rank)
        assert (grid.stage_id, grid.data_parallel_id, grid.get_slice_parallel_rank()) == tuple(at)
        wanted = {
            "pipe_parallel": topology.filter_match(data=at.data, model=at.model),
            "data_parallel": topology.filter_match(pipe=at.pipe, model=at.model),
            "slice_parallel": topology.filter_match(pipe=at.pipe, data=at.data),
            "tensor_model_parallel": topology.filter_match(pipe=at.pipe, data=at.data),
            "model_parallel": topology.filter_match(data=at.data),
        }
        for name, ranks in wanted.items():
            group = getattr(grid, f"get_{name}_group")()
            assert list(group.ranks) == group.gather_objects(world.rank) == ranks
            assert getattr(grid, f"get_{name}_rank")() == ranks.index(world.rank)
            assert getattr(grid, f"get_{name}_world_size")() == len(ranks)
            total = torch.tensor([float(world.rank)])
            group.all_reduce(total)
            assert total.item() == sum(ranks)
        assert grid.pp_group == wanted["pipe_parallel"]
        assert grid.dp_group == wanted["data_parallel"]
        assert grid.is_first_stage == (grid.stage_id == 0)
        assert grid.is_last_stage == (grid.stage_id == topology.get_dim("pipe") - 1)
        stages = [grid.stage_to_global(stage) for stage in range(topology.get_dim("pipe"))]
        assert stages == wanted["pipe_parallel"]
        grid.close()


def test_default_topology(world):
    grid = PipelineParallelGrid()
    factors = _prime_factors(world.size)
    pipe, data = math.prod(factors[0::2]), math.prod(factors[1::2])
    assert (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()) == (pipe, data)
    assert grid.get_slice_parallel_world_size() == 1
    grid.close()


def test_neighbours_exchange(world):
    """Each stage sends to the next one of its pair; the last one to the first."""
    grid = PipelineParallelGrid()
    pipe = grid.mesh.channel("pipe")["pipe"]
    own = next(pair for pair in grid.p2p_groups if pair[0] == world.rank)
    got = torch.tensor([-1])
    if pipe.size > 1:
        before = (pipe.rank - 1) % pipe.size
        work = pipe.start_send(torch.tensor([own[1]]), (pipe.rank + 1) % pipe.size)
        pipe.recv(got, before)
        work.wait()
        assert got.item() == world.rank
    else:
        assert own == [world.rank, world.rank]
    grid.close()


def test_wrong_number_of_ranks(world):
    with pytest.raises(TopologyError, match=f"the {world.size} ranks of the job"):
        PipelineParallelGrid(PipeDataParallelTopology(world.size + 1, 1))
    with pytest.raises(StageError, match="does not divide"):
        PipelineModule([nn.Identity()], num_stages=world.size + 1)


def test_groups_of_stages(world):
    grid = PipelineParallelGrid(PipeDataParallelTopology(world.size, 1))
    ends = grid.group_of_stages([0, world.size - 1], "ends")
    wanted = sorted({0, world.size - 1})
    assert (ends is not None) == (world.rank in wanted)
    if ends is not None:
        total = torch.tensor([world.rank])
        ends.start_all_reduce(total).wait()
        assert (list(ends.ranks), total.item()) == (wanted, sum(wanted))
    grid.close()


def layers():
    return [
        TiedLayerSpec("table", nn.Embedding, 8, 4),
        *[LayerSpec(nn.Linear, 4, 4) for _ in range(5)],
        torch.tanh,
        TiedLayerSpec("table", nn.Embedding, 8, 4, forward_fn=lambda table, x: x @ table.weight.t()),
    ]


def whole_state(world, module):
    """Parameters of all stages by name; copies have to be equal."""
    state = {}
    for part in world.comm.gather_objects({name: param.detach() for name, param in module.named_parameters()}):
        for name, param in part.items():
            assert torch.equal(state.setdefault(name, param), param)
    return state


def test_weights_do_not_depend_on_the_stages(world):
    torch.manual_seed(world.rank)
    before = torch.get_rng_state()
    states = []
    for stages in (n for n in range(1, world.size + 1) if world.size % n == 0):
        for chunks in (1, 2) if stages > 1 else (1,):
            module = PipelineModule(layers(), num_stages=stages, seed_layers=True, num_chunks=chunks)
            states.append(whole_state(world, module))
            module.grid.close()
    assert torch.equal(torch.get_rng_state(), before)
    assert set(states[0]) == {
        "tied_modules.table.weight",
        *[f"{i}.{w}" for i in range(1, 6) for w in ("weight", "bias")],
    }
    for state in states[1:]:
        assert set(state) == set(states[0])
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())


def test_a_pipeline_by_hand_is_the_whole_model(world):
    """Forward and backward stage by stage, with seeds, tied gradients and recomputation, against one stage."""
    tokens, results = torch.tensor([[1, 2], [3, 7]]), []
    for stages, interval in ((1, 0), (world.size, 0), (world.size, 2)):
        topology = PipeDataParallelTopology(stages, world.size // stages)
        settings = {"seed_layers": True, "activation_checkpoint_interval": interval}
        module = PipelineModule([*layers(), nn.Dropout(0.5)], topology=topology, **settings)
        results.append(step_by_hand(module, tokens))
        module.grid.close()
    gathered = [world.comm.gather_objects(grads) for grads in results]
    whole = gathered[0][0]
    for parts in gathered[1:]:
        assert set().union(*parts) == set(whole)
        for grads in parts:
            for name, grad in grads.items():
                torch.testing.assert_close(grad, whole[name], rtol=1e-5, atol=1e-6)


def step_by_hand(module, tokens):
    """One forward and backward pass with blocking messages; gradients of this rank's parameters."""
    pipe = module.grid.get_pipe_parallel_group()
    x = tokens
    if not module.grid.is_first_stage:
        x = torch.empty(2, 2, 4)
        pipe.recv(x, pipe.rank - 1)
        x.requires_grad_()
    out = module(x)
    if module.grid.is_last_stage:
        out.square().sum().backward()
    else:
        pipe.send(out.detach().contiguous(), pipe.rank + 1)
        grad = torch.empty_like(out)
        pipe.recv(grad, pipe.rank + 1)
        if out.requires_grad:
            out.backward(grad)
    if not module.grid.is_first_stage:
        pipe.send(x.grad.contiguous(), pipe.rank - 1)
    module.allreduce_tied_weight_gradients()
    return {name: param.grad for name, param in module.named_parameters()}


def test_measured_cut_is_equal_on_all_ranks(world):
    settings = {"partition_method": "profile", "profile_input": torch.zeros(4, dtype=torch.int64)}
    module = PipelineModule(layers(), num_stages=world.size, **settings)
    assert len(set(world.comm.gather_objects(tuple(module.parts)))) == 1
    module.grid.close()


def test_axes_of_mpi_communicators(world):
    """An mpu whose groups are communicators of another library."""
    from mpi4py import MPI

    stages = 2 if world.size % 2 == 0 else 1
    by_stage, by_data = divmod(world.rank, world.size // stages)
    groups = {
        "pipe_parallel": MPI.COMM_WORLD.Split(by_data, world.rank),
        "data_parallel": MPI.COMM_WORLD.Split(by_stage, world.rank),
        "slice_parallel": MPI.COMM_SELF,
    }
    mpu = type("Mpu", (), {})()
    for name, group in groups.items():
        setattr(mpu, f"get_{name}_group", lambda group=group: group)
        setattr(mpu, f"get_{name}_rank", group.Get_rank)
        setattr(mpu, f"get_{name}_world_size", group.Get_size)
    assert ranks_of(MPI.COMM_WORLD) == list(range(world.size))
    assert axes_of(mpu, world) == {"pipe": stages, "data": world.size // stages, "model": 1}
    groups["pipe_parallel"].Free()
    groups["data_parallel"].Free()
