"""Stages built in `zero.Init` are sharded over their own ranks, and learn what stages built whole learn."""

import pytest
import torch
from torch import nn

from mpispeed import zero
from mpispeed.base.errors import ConfigError, StageError
from mpispeed.comm import new_group
from mpispeed.pipe import LayerSpec, PipelineModule
from mpispeed.sharding import sharded_param
from tests.helpers.pipes import Case, Layout, all_weights, train
from tests.zoo import same_bits
from tests.zoo.training import start

pytestmark = pytest.mark.mpi(min_size=2)
WIDTH = 6


def linear():
    return LayerSpec(nn.Linear, WIDTH, WIDTH)


def square(outputs, labels):
    return ((outputs - labels) ** 2).mean()


def run(case, module, load=None, steps=3, **more):
    engine = start(case.settings(reduction="ordered", **more), module)
    if load is not None:
        engine.load_checkpoint(str(load))
    found = train(engine, range(steps)), all_weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.layout.ranks))
        for case in (
            Case(Layout(2, 1, 1), "interleaved", 3),
            Case(Layout(3, 1, 1), stage=0, is_tied=True),
            Case(Layout(2, 1, 2), stage=3, is_tied=True),
            Case(Layout(2, 2, 1), stage=2, is_tied=True),
        )
    ],
)
def test_training_is_bitwise_that_of_stages_built_whole(case):
    results = []
    for is_init_sharded in (False, True):
        with zero.Init(enabled=is_init_sharded):
            module = case.module()
        results.append(run(case, module))
        assert not any(map(sharded_param.is_sharded, module.parameters()))
    assert results[0][0] == results[1][0]
    same_bits(results[1][1], results[0][1])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seeds", ["of layers", "of ranks"])
def test_layers_are_sharded_over_the_ranks_that_build_them(seeds, world):
    built = []
    for is_init_sharded in (False, True):
        torch.manual_seed(1 + world.rank)
        layers = [linear(), nn.Linear(WIDTH, WIDTH), LayerSpec(nn.ReLU), linear(), linear()]
        with zero.Init(enabled=is_init_sharded):
            module = PipelineModule(layers, 2, seed_layers=seeds == "of layers", partition_method="uniform")
            after = nn.Linear(WIDTH, WIDTH)
        if is_init_sharded:
            assert {tuple(sharded_param.owner_of(p).ranks) for p in module.parameters()} == {
                tuple(module.grid.dp_group)
            }
            assert list(sharded_param.owner_of(after.weight).ranks) == list(range(4))
        with zero.GatheredParameters(module.parameters()):
            built.append({name: param.detach().clone() for name, param in module.named_parameters()})
    same_bits(built[1], world.comm.gather_objects(built[0])[module.grid.dp_group[0]])  # the first data rank's count


@pytest.mark.ranks(3)
def test_loaded_weights_on_disk_are_taken_over_and_checkpoints_are_resumed(world, mpi_tmp_path):
    case = Case(Layout(world.size, 1, 1), stage=3, is_tied=True)
    section = case.settings()["zero_optimization"]
    section["offload_param"] = {"device": "nvme", "nvme_path": str(mpi_tmp_path / "swap"), "max_in_cpu": 0}
    settings = case.settings(reduction="ordered", zero_optimization=section)
    module = case.module(base_seed=77)
    stored = {name: param.detach().clone() for name, param in module.named_parameters()}
    engine = start(settings, module)
    expected = train(engine, range(2))
    engine.save_checkpoint(str(mpi_tmp_path / "saved"))
    resumed = train(engine, range(2)), all_weights(engine)
    engine.destroy()
    for load in (None, mpi_tmp_path / "saved"):
        with zero.Init(config_dict_or_path=settings):
            module = case.module()
        for name, param in module.named_parameters():  # as `from_pretrained` does
            with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
                param.copy_(stored[name])
        found = run(case, module, load, steps=2, zero_optimization=section)
        assert found[0] == (expected if load is None else resumed[0])
    same_bits(found[1], resumed[1])
    world.comm.barrier()
    assert not list(mpi_tmp_path.rglob("*.swap"))


@pytest.mark.ranks(2)
def test_layers_that_all_ranks_have_built_sharded_are_refused():
    with zero.Init():
        module = PipelineModule([nn.Linear(WIDTH, WIDTH) for _ in range(2)], 2, loss_fn=square)
    with pytest.raises(ConfigError, match=r"0.weight was cut over the ranks \[0, 1\] .* LayerSpec"):
        start({"train_batch_size": 4, "optimizer": {"type": "Adam"}}, module)


@pytest.mark.ranks(4)
def test_a_group_across_stages_is_refused(world):
    groups = [new_group([0, 2]), new_group([1, 3])]
    with (
        pytest.raises(StageError, match=r"shards over the ranks \[0, 2\], and layers .* \[0, 1\]"),
        zero.Init(data_parallel_group=groups[world.rank % 2]),
    ):
        PipelineModule([linear() for _ in range(3)], 2)
    assert PipelineModule([linear() for _ in range(3)], 2).num_stages == 2


@pytest.mark.ranks(4)
def test_a_layer_that_one_rank_of_a_stage_cannot_build_is_told_to_all(world):
    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            if world.rank == 3:
                raise FileNotFoundError

    with pytest.raises(StageError, match="FileNotFoundError"), zero.Init():
        PipelineModule([linear(), LayerSpec(Odd), linear(), LayerSpec(Odd)], 2, partition_method="uniform")
