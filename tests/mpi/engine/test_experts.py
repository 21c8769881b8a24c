"""Layers of experts under an engine: all stages and groups of experts train as plain torch does."""

import copy

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.base.even_split import share
from mpispeed.checkpoints import open_checkpoint
from mpispeed.ckpt.format.logical import ALL_EXPERTS
from mpispeed.moe import MoE
from mpispeed.nn.expert import ExpertModules, RoutedExperts, Router, SwiGLUExperts
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from mpispeed.zero import GatheredParameters, unwrap_model_for_generation
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.expert_training import (
    BATCH,
    EXPERTS,
    LENGTH,
    SGD,
    Net,
    data,
    group_sizes,
    reference,
    same_tensors,
    whole_of,
)
from tests.helpers.experts import HIDDEN, Block
from tests.helpers.feature_models import SHAPE, gpt_layers, layers
from tests.helpers.tensor import assert_near
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)


def train(engine, comm, batches):
    for x, y in batches:
        engine.backward(engine(x.chunk(comm.size)[comm.rank], y.chunk(comm.size)[comm.rank]))
        engine.step()


def compare(engine, expected):
    second = engine.module.second.experts.held
    for name, value in weights(engine).items():
        wanted = expected[name]
        is_fused = name.startswith("second.experts.")
        assert_near(value, wanted[second.start : second.stop] if is_fused else wanted, 1e-5, name)


def test_names_of_experts_are_their_numbers(comm):
    engine = start(config(3, BATCH, 1, **ADAM), Net(comm.size))
    held = range(*share(EXPERTS, comm.rank, comm.size))
    each = len(held)
    names = {name.split(".")[3] for name, _ in engine.module.first.named_parameters() if "deepspeed_experts" in name}
    assert names == set(map(str, held))
    assert engine.module.second.experts.gate_up_proj.ds_shape[0] == each
    assert len(engine.module.first.deepspeed_moe.experts.deepspeed_experts) == each
    assert engine.module.first.num_local_experts == each
    engine.destroy()


def test_biases_move_once_for_each_update(comm):
    engine = start(config(2, BATCH, 1, **ADAM), Net(comm.size, bias_rate=0.125))
    gate, before = engine.module.second.gate, torch.zeros(EXPERTS)
    for x, y in data():
        engine.backward(engine(x.chunk(comm.size)[comm.rank], y.chunk(comm.size)[comm.rank]))
        load = gate._load[0].clone()
        comm.all_reduce(load)
        assert load.sum() == BATCH * LENGTH * 2
        engine.step()
        before = before + 0.125 * (load.double().mean() - load).sign()
        assert torch.equal(gate.bias, before.float())
        assert gate._load is None
    engine.destroy()


def test_copies_of_a_model_are_trained_alike(comm):
    expected, _ = reference()
    engine = start(config(2, BATCH, 1, **SGD), copy.deepcopy(Net(comm.size)))
    train(engine, comm, data())
    compare(engine, expected)
    engine.destroy()


@pytest.mark.ranks(2, 4)
def test_whole_parameters_of_all_experts_of_a_rank(comm):
    """Their names have numbers, which differ between ranks."""
    engine = start(config(3, BATCH, 1, **ADAM), Net(comm.size))
    model, held = engine.module, engine.module.second.experts.held
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        for param in model.first.deepspeed_moe.experts.parameters():
            param.data.fill_(comm.rank)
        model.first.coefficient.bias.data.fill_(comm.rank + 5)
    with unwrap_model_for_generation(engine) as whole:
        assert all(bool((param == comm.rank).all()) for param in whole.first.deepspeed_moe.experts.parameters())
        assert len(whole.second.experts.down_proj) == len(held)
        assert bool((whole.first.coefficient.bias == 5).all())
    engine.destroy()


def test_a_copy_of_a_model_in_training_goes_on_in_an_engine_of_its_own(comm):
    expected, _ = reference()
    engine = start(config(1, BATCH, 1, **SGD), Net(comm.size))
    train(engine, comm, data()[:1])
    other = start(config(2, BATCH, 1, **SGD), copy.deepcopy(engine.module))
    for each in (other, engine):
        train(each, comm, data()[1:])
        compare(each, expected)
    for each in (engine, other):
        each.destroy()


@pytest.mark.parametrize("is_clients", on_ranks([False, True]))
def test_parameters_listed_before_experts_are_shared_out(comm, is_clients):
    expected, _ = reference()
    model = Net(comm.size)
    listed = list(model.parameters())
    given = {"optimizer": torch.optim.SGD(listed, 0.01)} if is_clients else {"model_parameters": listed}
    settings = config(2, BATCH, 1, **SGD)
    if is_clients:
        del settings["optimizer"]
    engine = start(settings, model, **given)
    train(engine, comm, data())
    compare(engine, expected)
    engine.destroy()


def test_a_second_engine_has_groups_of_its_own(comm):
    expected, _ = reference()
    model = Net(comm.size)
    engine = start(config(2, BATCH, 1, **SGD), model)
    train(engine, comm, data()[:1])
    engine.destroy()
    assert model.second.comm is None
    if comm.size > 1:
        with pytest.raises(ConfigError, match="OneBitAdam takes means"):  # found after experts are shared out
            start(config(0, BATCH, 1, optimizer={"type": "OneBitAdam", "params": {"lr": 0.01}}), model)
    again = start(config(3, BATCH, 1, **SGD), model)
    train(again, comm, data()[1:])
    compare(again, expected)
    again.destroy()


@pytest.mark.ranks(2, 4)
def test_groups_are_left_to_initialize(comm):
    layer = MoE(HIDDEN, Block(), num_experts=4, ep_size=2)
    layer.set_deepspeed_parallelism()
    with pytest.raises(ConfigError, match=r"layer deepspeed_moe of the model has its group of 2 ranks already"):
        start(config(1, BATCH, 1, **ADAM), layer)


class WithBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("experts", "text"),
    [
        (lambda: SwiGLUExperts(HIDDEN, 5, 1), "some would have none of the 1 experts"),
        (lambda: ExpertModules(WithBuffer(), 4), "its experts have buffers"),
    ],
)
def test_layers_that_cannot_be_shared_out_are_named(comm, experts, text):
    made = experts()
    layer = RoutedExperts(Router(HIDDEN, made.num_experts), made, ep_size=2)
    with pytest.raises(ConfigError, match=rf"layer 1 shares its experts out over ep_size = 2 ranks: .*{text}"):
        start(config(1, BATCH, 1, **ADAM), nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer))


@pytest.mark.ranks(2, 4)
def test_experts_of_other_layers_are_refused(comm):
    """Their ranks' values would be replaced by those of the first."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Block())
    for param in model[1].parameters():
        param.allreduce, param.group_name = False, "ep_size_2"
    with pytest.raises(ConfigError, match=r"parameter 1\.\S+ has allreduce = False and group_name = 'ep_size_2'"):
        start(config(1, BATCH, 1, **ADAM), model)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_experts_that_only_some_ranks_train_are_refused(comm, stage):
    model = Net(comm.size)
    model.first.deepspeed_moe.experts.deepspeed_experts[0].requires_grad_(False)
    if comm.rank:
        model.first.deepspeed_moe.experts.deepspeed_experts[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"data ranks \[1.*\] have experts in other units than data rank 0: freeze"):
        start(config(stage, BATCH, 1, **ADAM), model)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def trained(comm, ep_size, stage):
    engine = start(config(stage, BATCH, 1, **ADAM), Net(ep_size, bias_rate=0.01))
    train(engine, comm, data())
    return engine


@pytest.mark.parametrize(("stage", "later"), in_turn([(0, 2), (1, 3), (2, 0), (3, 1)]))
def test_a_checkpoint_fits_any_groups_and_stages(comm, mpi_tmp_path, stage, later):
    sizes = group_sizes(comm)
    for ep_size, other in zip(sizes, [*sizes[1:], sizes[0]], strict=True):
        engine = trained(comm, ep_size, stage)
        engine.save_checkpoint(str(mpi_tmp_path), tag=f"ep{ep_size}")
        found = whole_of(engine, comm)
        engine.destroy()
        check_file(mpi_tmp_path / f"ep{ep_size}", found)
        again = start(config(later, BATCH, 1, **ADAM), Net(other, bias_rate=0.01))
        again.load_checkpoint(str(mpi_tmp_path), tag=f"ep{ep_size}")
        loaded = whole_of(again, comm)
        assert loaded.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in loaded.items())
        again.save_checkpoint(str(mpi_tmp_path), tag="again")
        assert same_tensors(mpi_tmp_path / "again", mpi_tmp_path / f"ep{ep_size}")
        again.destroy()


def check_file(path, found):
    """The file has the tensors of the whole model."""
    opened = open_checkpoint(path.parent, path.name)
    model = Net()
    assert set(opened.names()) == {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        out = torch.empty(param.numel())
        opened.read(name, "master", 0, out)
        assert torch.equal(out.view(param.shape), found[name]), name
    prefix = "first.deepspeed_moe.experts.deepspeed_experts."
    assert opened.info(f"{prefix}6.up.weight").expert == (6, EXPERTS)
    assert opened.info("second.experts.down_proj").expert == (ALL_EXPERTS, EXPERTS)


@pytest.mark.parametrize("stage", on_ranks([0, 2, 3]))
def test_the_file_of_all_weights_has_all_experts(comm, mpi_tmp_path, stage):
    for ep_size in group_sizes(comm):
        settings = config(stage, BATCH, 1, zero={"stage3_gather_16bit_weights_on_model_save": True}, **ADAM)
        engine = start(settings, Net(ep_size))
        train(engine, comm, data()[:1])
        assert engine.save_16bit_model(str(mpi_tmp_path), f"{ep_size}.bin")
        whole = whole_of(engine, comm)
        engine.destroy()
        if comm.rank == 0:
            found = torch.load(mpi_tmp_path / f"{ep_size}.bin", weights_only=True)
            assert set(found) == set(Net().state_dict())
            assert all(torch.equal(value, whole[name]) for name, value in found.items())


@pytest.mark.ranks(2, 4)
def test_groups_and_frozen_ones_are_those_of_the_same_place_on_other_ranks(comm, mpi_tmp_path):
    """Groups that are cut between the experts of a rank, and experts of a rank that differ, as all ranks have them."""
    model, experts = Net(comm.size, experts=12), 12
    for layer in (model.first.deepspeed_moe, model.second):
        layer.experts.keep(range(experts // comm.size))
    own = model.first.deepspeed_moe.experts.deepspeed_experts
    own[0].requires_grad_(False)
    params = [param for expert in own for param in expert.parameters()]
    apart = {id(param) for param in params}
    rest = [param for param in model.parameters() if id(param) not in apart]
    cut = len(params) // 3 * 2
    groups = [{"params": part, "lr": 0.01} for part in (rest, params[:cut], params[cut:])]
    engine = start(config(2, BATCH, 1, **ADAM), model, model_parameters=groups)
    train(engine, comm, data()[:1])
    before = weights(engine)
    engine.save_checkpoint(str(mpi_tmp_path), tag="one")
    train(engine, comm, data()[1:2])
    engine.load_checkpoint(str(mpi_tmp_path), tag="one")
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    opened, each = open_checkpoint(mpi_tmp_path, "one"), experts // comm.size
    prefix = "first.deepspeed_moe.experts.deepspeed_experts."
    for number in range(experts):
        info = opened.info(f"{prefix}{number}.up.weight")
        assert info.kind == ("frozen" if number % each == 0 else "trainable")
        assert info.param_group == (-1 if number % each == 0 else 1 if number % each < each * 2 // 3 else 2)
    engine.destroy()


@pytest.mark.ranks(4)
def test_a_pipeline_goes_on_without_stages(mpi_tmp_path):
    losses = []
    for stages, stage in ((2, 1), (1, 2)):
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=1, num_dp=4 // stages)
        model = PipelineModule(layers(ep_size=2), topology=topology, loss_fn=gpt_layers.cross_entropy, base_seed=stages)
        engine = start(config(stage, BATCH, **ADAM), model)
        engine.load_checkpoint(str(mpi_tmp_path))
        losses.append([pipeline_loss(engine, step) for step in range(engine.global_steps, engine.global_steps + 2)])
        if stages == 2:
            engine.save_checkpoint(str(mpi_tmp_path))
            losses[0].append(pipeline_loss(engine, 2))
        engine.destroy()
    assert losses[1][0] == pytest.approx(losses[0][2], rel=1e-5)  # the same sums in another order


def pipeline_loss(engine, step):
    tokens = (torch.arange(SHAPE.block + 1) + torch.arange(BATCH)[:, None] * 7 + step) % 256
    batch = tokens[:, :-1], tokens[:, 1:]
    micros = range(engine.gradient_accumulation_steps())
    return float(engine.train_batch(iter([own_part(engine, batch, micro) for micro in micros])))
