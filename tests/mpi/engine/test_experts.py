"""Layers of experts under an engine: all stages and groups of experts train as plain torch does."""

import copy

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.checkpoints import open_checkpoint
from mpispeed.ckpt.format.logical import ALL_EXPERTS
from mpispeed.moe import MoE
from mpispeed.nn.expert import ExpertModules, RoutedExperts, Router, RouterOptions, SwiGLUExperts
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from mpispeed.zero import GatheredParameters, unwrap_model_for_generation
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.experts import HIDDEN, Block
from tests.helpers.features import SHAPE, gpt_layers, layers
from tests.helpers.tensor import assert_near
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)

BATCH, STEPS, LENGTH, EXPERTS = 24, 3, 2, 12
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "zero_allow_untested_optimizer": True}


class Net(nn.Module):
    """Both kinds of layers of experts, one behind the other; no two experts are alike."""

    def __init__(self, ep_size=1, bias_rate=0.0):
        super().__init__()
        torch.manual_seed(5)
        self.first = MoE(HIDDEN, Block(), num_experts=EXPERTS, k=2, drop_tokens=False, use_residual=True,
                         top2_2nd_expert_sampling=False)  # fmt: skip
        gate = Router(HIDDEN, EXPERTS, RouterOptions(k=2, bias_rate=bias_rate))
        self.second = RoutedExperts(gate, SwiGLUExperts(HIDDEN, 5, EXPERTS))
        with torch.no_grad():
            for param in self.first.deepspeed_moe.experts.parameters():
                param.add_(0.2 * torch.randn(param.shape))
        if ep_size > 1:
            self.first.ep_size = self.first.deepspeed_moe.ep_size = self.second.ep_size = ep_size

    def forward(self, x, y):
        hidden, _, _ = self.first(x)  # its balance loss would be one of each rank's tokens
        return (self.second(hidden)[0] - y).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator) for _ in range(STEPS)]


def reference(clip=0.0):
    """Weights and norms of plain torch in one process."""
    model, norms = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in data():
        model(x, y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def train(engine, comm, batches, accumulation=1):
    norms = []
    for x, y in batches:
        parts = list(zip(x.chunk(comm.size * accumulation), y.chunk(comm.size * accumulation), strict=True))
        for micro in range(accumulation):
            engine.backward(engine(*parts[micro * comm.size + comm.rank]))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def group_sizes(comm):
    return [size for size in range(1, comm.size + 1) if comm.size % size == 0]


def compare(engine, expected):
    second = engine.module.second.experts.held
    for name, value in weights(engine).items():
        wanted = expected[name]
        is_fused = name.startswith("second.experts.")
        assert_near(value, wanted[second.start : second.stop] if is_fused else wanted, 1e-5, name)


@pytest.mark.parametrize(("stage", "accumulation", "clip"), on_ranks([0, 1, 2, 3], [1, 2], [0.0, 0.05]))
def test_training_is_that_of_one_process(comm, stage, accumulation, clip):
    expected, wanted = reference(clip)
    for ep_size in group_sizes(comm):
        engine = start(config(stage, BATCH, accumulation, gradient_clipping=clip, **SGD), Net(ep_size))
        assert train(engine, comm, data(), accumulation) == pytest.approx(wanted, rel=1e-5)
        compare(engine, expected)
        engine.destroy()


def test_names_of_experts_are_their_numbers(comm):
    engine = start(config(3, BATCH, 1, **ADAM), Net(comm.size))
    each = EXPERTS // comm.size
    held = range(comm.rank * each, (comm.rank + 1) * each)
    names = {name.split(".")[3] for name, _ in engine.module.first.named_parameters() if "deepspeed_experts" in name}
    assert names == set(map(str, held))
    assert engine.module.second.experts.gate_up_proj.ds_shape[0] == each
    assert len(engine.module.first.deepspeed_moe.experts.deepspeed_experts) == each
    engine.destroy()


@pytest.mark.parametrize("stage", on_ranks([0, 1, 2, 3]))
def test_ranks_with_other_numbers_of_tokens(comm, stage):
    """None of them waits for another: DeepSpeed issues 6809 and 5794."""
    for ep_size in group_sizes(comm):
        engine = start(config(stage, BATCH, 1, **ADAM), Net(ep_size))
        for step in range(3):
            length = (comm.rank + step) % 3
            x, y = torch.randn(2, 2, length, HIDDEN)
            loss = engine(x, y) if length else engine(x, y).nan_to_num()
            engine.backward(loss)
            engine.step()
        assert all(value.isfinite().all() for value in weights(engine).values())
        engine.destroy()


@pytest.mark.parametrize("dtype", in_turn(["bf16", "fp16"]))
def test_sixteen_bits(comm, dtype):
    engine = start(config(2, BATCH, 1, dtype=dtype, **ADAM), Net(comm.size))
    train(engine, comm, [batch.to(next(engine.module.parameters()).dtype) for batch in data()])
    assert all(value.isfinite().all() for value in weights(engine).values())
    engine.destroy()


def test_numbers_that_are_none_on_one_rank_skip_the_step_everywhere(comm):
    engine = start(config(2, BATCH, 1, dtype="fp16", **ADAM), Net(comm.size))
    before = weights(engine)
    x, y = (part.chunk(comm.size)[comm.rank].half() for part in data()[0])
    if comm.rank == comm.size - 1:
        x = x.index_fill(0, torch.tensor([1]), torch.inf)
    engine.backward(engine(x, y))
    engine.step()
    assert engine.skipped_steps == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    engine.destroy()


def test_biases_move_once_for_each_update(comm):
    engine = start(config(2, BATCH, 1, **ADAM), Net(comm.size, bias_rate=0.125))
    gate, before = engine.module.second.gate, torch.zeros(EXPERTS)
    for x, y in data():
        engine.backward(engine(x.chunk(comm.size)[comm.rank], y.chunk(comm.size)[comm.rank]))
        load = gate._load.clone()
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
        (lambda: SwiGLUExperts(HIDDEN, 5, 3), "do not divide the 3 experts"),
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


def whole_of(engine, comm):
    """Weights of all experts by their names in a model with all of them, on all ranks; and buffers."""
    own = weights(engine) | dict(engine.module.named_buffers())
    held = engine.module.second.experts.held
    rows = comm.gather_objects((held.start, own))
    found = {}
    for _, values in sorted(rows, key=lambda row: row[0]):
        for name, value in values.items():
            if not name.startswith("second.experts."):
                found.setdefault(name, value)
    size = engine.module.second.comm.size if engine.module.second.comm else 1
    for name in (name for name in own if name.startswith("second.experts.")):
        found[name] = torch.cat([values[name] for _, values in rows[:size]])
    return found


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
    assert opened.info(f"{prefix}7.up.weight").expert == (7, EXPERTS)
    assert opened.info("second.experts.down_proj").expert == (ALL_EXPERTS, EXPERTS)


def same_tensors(one, two):
    """True if all tensors, slots of the optimizer too, are equal to the bit."""
    a, b = (open_checkpoint(path.parent, path.name) for path in (one, two))
    rows = [(name, slot) for name in a.names() for slot in a.slots(name)]
    assert rows == [(name, slot) for name in b.names() for slot in b.slots(name)]
    return all(torch.equal(a.read_whole(*row), b.read_whole(*row)) for row in rows)


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
    model = Net(comm.size)
    for layer in (model.first.deepspeed_moe, model.second):
        layer.experts.keep(range(EXPERTS // comm.size))
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
    opened, each = open_checkpoint(mpi_tmp_path, "one"), EXPERTS // comm.size
    prefix = "first.deepspeed_moe.experts.deepspeed_experts."
    for number in range(EXPERTS):
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
