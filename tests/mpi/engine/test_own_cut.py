"""Models that cut their layers themselves train as one process does, and lose nothing in checkpoints."""

import pytest
import torch

import mpispeed
from mpispeed import comm
from mpispeed.base.errors import CheckpointError, ConfigError
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.optim import CPULamb
from tests.helpers.covering import in_turn
from tests.helpers.own_cut import Cut, Mpu, OwnCut
from tests.zoo.models import batches
from tests.zoo.training import WARM, config, train_averaged, train_warm

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 4)]

STEPS, BATCH = 5, 8


@pytest.fixture(scope="module")
def plain():
    return train_warm(OwnCut(), batches(STEPS, BATCH))


@pytest.fixture
def mpu():
    made = Mpu(2)
    yield made
    made.free()


def make(mpu, stage, model=None, **more):
    model = model if model is not None else OwnCut(mpu)
    return mpispeed.initialize(model=model, mpu=mpu, config=config(stage, BATCH, 1, **(WARM | more)))[0]


@pytest.fixture
def torch_mpu(mpi_tmp_path, world):
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # the one of an engine that was made before
    store = torch.distributed.FileStore(str(mpi_tmp_path / "store"), world.size)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    made = Mpu(2, is_torch=True)
    yield made
    made.free()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3], ranks=(2, 4, 4, 2)))
def test_a_model_with_an_mpu_of_mpi4py_learns_as_one_process_does(mpu, plain, stage):
    engine = make(mpu, stage)
    losses = train_averaged(engine, batches(STEPS, BATCH))
    engine.destroy()
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", in_turn([0, 2], ranks=(2, 4)))
def test_norms_of_layers_are_over_their_slices(mpu, stage):
    """LAMB steps in proportion to the norm of a layer, of which every rank of the model axis has a part."""
    lamb = {"type": "Lamb", "params": {"weight_decay": 0.01}}
    engine = make(mpu, stage, optimizer=lamb)
    losses = train_averaged(engine, batches(STEPS, BATCH))
    engine.destroy()
    alone = OwnCut()
    wanted = train_warm(alone, batches(STEPS, BATCH), CPULamb(alone.parameters(), weight_decay=0.01))
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)


class Uneven(torch.nn.Module):
    """Slices of 5 and 4 of 9 columns, so that units of parameters end elsewhere on other slices."""

    def __init__(self, mpu):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = torch.nn.ModuleList(
                Cut(*sizes, dim, mpu, marks=True) for _ in range(2) for sizes, dim in (((8, 9), 0), ((9, 8), 1))
            )

    def forward(self, x):
        up, down, again, last = self.layers
        return last(torch.tanh(again(x + down(torch.tanh(up(x)))))).square().mean()


@pytest.mark.parametrize("stage", in_turn([0, 2], ranks=(2, 4)))
def test_norms_of_uneven_slices_are_of_the_same_parameters(mpu, stage):
    def groups(model):
        named = dict(model.named_parameters())
        return [
            {"params": [param for name, param in named.items() if ("bias" in name) == is_bias], "weight_decay": decay}
            for is_bias, decay in ((False, 0.1), (True, 0.0))
        ]

    data = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0))
    alone = Uneven(None)
    optimizer, wanted = CPULamb(groups(alone), lr=1e-2), []
    for x in data:
        loss = alone(x)
        wanted.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    settings = config(stage, 4, 1, **WARM)
    settings |= {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}, "gradient_clipping": 0.0}
    settings["zero_optimization"]["reduce_bucket_size"] = 80
    del settings["scheduler"]
    model = Uneven(mpu)
    engine = mpispeed.initialize(model=model, mpu=mpu, model_parameters=groups(model), config=settings)[0]
    found = []
    for x in data:
        loss = engine(x.chunk(engine.mesh["data"].size)[engine.mesh.index("data")])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone().view(1)
        engine.mesh["data"].all_reduce(total, scale=1 / engine.mesh["data"].size)
        found.append(float(total))
    engine.destroy()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", in_turn([0, 3], ranks=(4, 2)))
def test_a_model_with_an_mpu_of_torch_learns_as_one_process_does(torch_mpu, plain, stage):
    engine = make(torch_mpu, stage)
    losses = train_averaged(engine, batches(STEPS, BATCH))
    engine.destroy()
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)


@pytest.mark.ranks(2)
def test_uneven_and_unmarked_slices_are_found_and_named(mpu, plain, caplog):
    """Inner width 49 on two ranks; clipping needs to know which of the parameters are slices."""
    expected = train_warm(OwnCut(inner=49), batches(STEPS, BATCH))
    engine = make(mpu, 2, OwnCut(mpu, inner=49, marks=False))
    losses = train_averaged(engine, batches(STEPS, BATCH))
    engine.destroy()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    said = [text for text in caplog.messages if "differ between the 2 ranks of a model group" in text]
    assert len(said) == (engine.mesh.rank == 0), caplog.messages


def test_the_norm_counts_pieces_of_all_ranks_and_copies_once(mpu):
    model, batch = OwnCut(), batches(1, BATCH)[0]
    model(batch).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    engine = make(mpu, 1)
    train_averaged(engine, [batch])
    assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-5)
    engine.destroy()


@pytest.mark.parametrize(("stage", "inner"), in_turn([(0, 48), (1, 49), (2, 48), (3, 49)], ranks=(2, 4)))
def test_a_restart_goes_on_bit_by_bit(mpu, mpi_tmp_path, stage, inner):
    def fresh():
        return make(mpu, stage, OwnCut(mpu, inner=inner), reduction="ordered")

    engine, data = fresh(), batches(STEPS, BATCH)
    train_averaged(engine, data[:3])
    engine.module.place += 10
    engine.save_checkpoint(str(mpi_tmp_path))
    expected = train_averaged(engine, data[3:])
    engine.destroy()
    engine = fresh()
    engine.load_checkpoint(str(mpi_tmp_path))
    assert train_averaged(engine, data[3:]) == expected
    assert engine.module.place.tolist() == [10.0 + mpu.get_model_parallel_rank()] * 2
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_model_parallel_size_is_refused(mpu, mpi_tmp_path):
    engine = make(mpu, 1)
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.destroy()
    with open_checkpoint(mpi_tmp_path) as source:  # along the dim that the model names it is the whole
        for name, param in OwnCut().named_parameters():
            assert torch.equal(source.read_whole(name, "master"), param), name
    engine = mpispeed.initialize(model=OwnCut(), config=config(1, BATCH, 1, **WARM))[0]
    with pytest.raises(CheckpointError, match=r"dense.weight is 2 pieces of .* and one whole in the model.*as when"):
        engine.load_checkpoint(str(mpi_tmp_path))
    engine.save_checkpoint(str(mpi_tmp_path), "whole")
    engine.destroy()
    engine = make(mpu, 1)
    with pytest.raises(CheckpointError, match=r"is one whole in .* and 2 pieces of"):
        engine.load_checkpoint(str(mpi_tmp_path), "whole")
    engine.destroy()


@pytest.mark.ranks(4)
def test_slices_that_are_born_cut_over_data_ranks(mpu, plain, world):
    groups = [comm.new_group(list(range(place, world.size, 2))) for place in range(2)]
    with mpispeed.zero.Init(data_parallel_group=groups[world.rank % 2]):
        model = OwnCut(mpu)
    engine = make(mpu, 3, model)
    losses = train_averaged(engine, batches(STEPS, BATCH))
    engine.destroy()
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)
    with mpispeed.zero.Init():
        model = OwnCut(mpu)
    with pytest.raises(ConfigError, match=r"embed.weight was cut over the ranks \[0, 1.* its data ranks are \[0"):
        make(mpu, 3, model)


@pytest.mark.ranks(2)
def test_a_layer_of_two_dtypes_is_refused(mpu):
    model = OwnCut(mpu)
    name, param = next(iter(model.named_parameters()))
    if mpu.get_model_parallel_rank() == 1:
        param.data = param.data.double()
    with pytest.raises(ConfigError, match=rf"{name} has the dtypes torch.float32 and torch.float64"):
        make(mpu, 0, model)


@pytest.mark.ranks(4)
def test_replicas_that_come_to_other_slices_are_refused(mpu):
    model = OwnCut(mpu, marks=False)
    name, param = next((name, param) for name, param in model.named_parameters() if "norm" in name or "embed" in name)
    if (mpu.get_data_parallel_rank(), mpu.get_model_parallel_rank()) == (1, 1):
        param.data += 1
    with pytest.raises(
        ConfigError, match=rf"{name} differs between the ranks that share a layer in some data replicas"
    ):
        make(mpu, 0, model)


@pytest.mark.ranks(2)
def test_slices_without_an_mpu_are_refused(mpu):
    with pytest.raises(ConfigError, match=r"layers.0.query.weight is marked .* pass their mpu"):
        mpispeed.initialize(model=OwnCut(mpu), config=config(0, BATCH, 1, **WARM))


@pytest.mark.ranks(2)
def test_layers_that_are_cut_already_are_not_cut_again(mpu):
    sliced = {"tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ConfigError, match=r"parameter layers.0.query.weight is a slice already"):
        make(mpu, 0, **sliced)
