"""Layers of a model from `zero.Init` are sliced one at a time, and learn what those of a whole model learn."""

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed import zero
from mpispeed.base.errors import ConfigError
from mpispeed.comm import new_group
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.nn.tensor import ColumnLinear, cuts, inject
from mpispeed.sharding import sharded_init, sharded_param
from mpispeed.sharding.init_slices import InitSlices
from tests.helpers.covering import in_turn
from tests.zoo import same_bits
from tests.zoo.models import Block, TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=2)
TABLE = {"up": "column", "down": "row", "embed": "vocab"}
"""The head is tied to the embedding, and both are sliced."""


def settings_of(stage, slices, disk=None, policy=None):
    section = {"offload_param": {"device": "nvme", "nvme_path": str(disk), "max_in_cpu": 0}} if disk else {}
    sliced = {"autotp_size": slices} | ({"injection_policy_tuple": policy} if policy else {})
    return config(stage, 12, 1, **WARM, reduction="ordered", zero=section, tensor_parallel=sliced)


def trained(model, settings, load=None, steps=3):
    engine = mpispeed.initialize(model=model, config=settings)[0]
    if load is not None:
        engine.load_checkpoint(str(load))
    found = train_averaged(engine, batches(steps, 12)), weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("slices", "stage", "policy"),
    [
        pytest.param(2, 3, TABLE, marks=pytest.mark.ranks(4)),
        pytest.param(2, 0, None, marks=pytest.mark.ranks(4)),
        pytest.param(2, 2, TABLE, marks=pytest.mark.ranks(4)),
        pytest.param(3, 1, TABLE, marks=pytest.mark.ranks(3)),  # 61 rows on 3 ranks: uneven
    ],
)
def test_training_is_bitwise_that_of_a_model_built_whole(slices, stage, policy, world):
    results = []
    for is_init_sharded in (False, True):
        with zero.Init(enabled=is_init_sharded):
            model = TinyLM(seed=7 + (world.rank if is_init_sharded else 0))  # the first rank's values count
        results.append(trained(model, settings_of(stage, slices, policy=policy)))
        assert any(cut.kind == "column" for cut in cuts(model).values())
        assert not any(map(sharded_param.is_sharded, model.parameters()))
    assert results[0][0] == results[1][0]
    same_bits(results[1][1], results[0][1])


@pytest.mark.ranks(4)
def test_one_layer_is_whole_at_a_time_and_slices_are_sharded_at_once(world):
    mesh = Mesh(Topology({"data": 2, "model": 2}), world)
    with zero.Init() as context:
        model = TinyLM(depth=6)
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    context.sharded_init.peak_elements = 0
    layers = InitSlices(model, mesh["data"], mesh["model"])
    inject(model, mesh["model"], TABLE, layers=layers)
    assert all(map(sharded_param.is_sharded, model.parameters()))
    assert model.head.weight is model.embed.weight
    layers.move(model)
    assert context.sharded_init.peak_elements == largest
    assert context.sharded_init.live_elements == 0
    owners = {id(owner): owner for owner in map(sharded_param.owner_of, model.parameters())}.values()
    assert [list(owner.ranks) for owner in owners] == [list(mesh["data"].ranks)]
    held = sum(shard.shard.numel() for shard in sharded_init._INIT_SHARD.values())
    assert held == sum(-(-param.numel() // 2) for param in model.parameters())  # nothing of the layers is left
    mesh.close()


@pytest.mark.ranks(4)
def test_values_of_data_groups_become_those_of_the_first_slice(world):
    groups = [new_group(list(range(place, world.size, 2))) for place in range(2)]
    results = []
    for is_init_sharded in (False, True):
        with zero.Init(data_parallel_group=groups[world.rank % 2], enabled=is_init_sharded):
            model = TinyLM(seed=7 + world.rank)  # as for a model built whole, the first slice's values count
        results.append(trained(model, settings_of(3, 2, policy=TABLE)))
    assert results[0][0] == results[1][0]
    same_bits(results[1][1], results[0][1])


@pytest.mark.ranks(2)
def test_layers_are_sliced_inside_of_the_context_too(world):
    results = []
    for is_inside in (False, True):
        with zero.Init(enabled=is_inside):
            model = TinyLM()
            found = trained(model, settings_of(1, 2)) if is_inside else None
        results.append(found or trained(model, settings_of(1, 2)))
    assert results[0][0] == results[1][0]
    same_bits(results[1][1], results[0][1])


@pytest.mark.parametrize("device", in_turn(["cpu", "nvme"], ranks=(2, 3)))
def test_loaded_weights_in_each_tier_are_sliced_and_checkpoints_are_resumed(device, world, mpi_tmp_path):
    stored = TinyLM(seed=11).state_dict()
    settings = settings_of(3, world.size, mpi_tmp_path / "swap" if device == "nvme" else None, TABLE)
    model = TinyLM(seed=11)
    engine = mpispeed.initialize(model=model, config=settings)[0]
    expected = train_averaged(engine, batches(2, 12))
    engine.save_checkpoint(str(mpi_tmp_path / "saved"))
    resumed = train_averaged(engine, batches(2, 12)), weights(engine)
    engine.destroy()
    for load in (None, mpi_tmp_path / "saved"):
        with zero.Init(config_dict_or_path=settings, remote_device=device):
            model = TinyLM(seed=5)
        for name, param in model.named_parameters():  # as `from_pretrained` does
            with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
                if world.rank == 0:
                    param.copy_(stored[name])
        found = trained(model, settings, load, steps=2)
        assert found[0] == (expected if load is None else resumed[0])
    same_bits(found[1], resumed[1])
    world.comm.barrier()
    assert not list(mpi_tmp_path.rglob("*.swap"))


@pytest.mark.ranks(2)
def test_own_slices_that_were_sharded_over_all_ranks_are_refused(world):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = ColumnLinear(6, 8, world.comm, gather_output=True)
            self.block = Block(8)

    with zero.Init():
        model = Own()
    with pytest.raises(ConfigError, match=r"up.weight is a slice of a layer .* its data ranks are \[\d\]"):
        mpispeed.initialize(model=model, config=settings_of(1, 2))
