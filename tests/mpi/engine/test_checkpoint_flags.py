"""Flags and messages of save_checkpoint, load_checkpoint and save_16bit_model."""

import argparse
import enum
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import mpispeed
from mpispeed.base.errors import CheckpointError
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo import same_bits
from tests.zoo.models import WIDTH, Net, TinyLM, samples
from tests.zoo.training import ADAM, config, own_part, start, train, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
STAGES = pytest.mark.parametrize("stage", in_turn([0, 1, 2, 3], ranks=(1, 3, 1, 3)))
STAGES_AND_DTYPES = pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16"], ranks=(1, 3)))
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}}


def saved(folder, stage=1, model=None, steps=3, **save):
    engine = start(config(stage, **ADAM, **WARMUP), model)
    train(engine, samples(steps))
    assert engine.save_checkpoint(str(folder), **save) is True
    return engine


def test_the_schedule_is_loaded_only_when_wanted(mpi_tmp_path):
    first = saved(mpi_tmp_path)
    for is_wanted in (True, False):
        second = start(config(1, **ADAM, **WARMUP), Net(seed=9))
        fresh = second.lr_scheduler.state_dict()
        second.load_checkpoint(str(mpi_tmp_path), load_lr_scheduler_states=is_wanted)
        assert second.lr_scheduler.state_dict() == (first.lr_scheduler.state_dict() if is_wanted else fresh)
        same_bits(weights(second), weights(first))
        second.destroy()
    first.destroy()


@STAGES
def test_optimizer_states_are_loaded_only_when_wanted(stage, mpi_tmp_path):
    first = saved(mpi_tmp_path, stage)
    second = start(config(stage, **ADAM, **WARMUP), Net(seed=9))
    second.load_checkpoint(str(mpi_tmp_path), load_optimizer_states=False)
    for unit in second.parts.table.units:
        assert not any(tensor.any() for tensor in second.parts.optimization.states.of(unit).values())
    same_bits(weights(second), weights(first))
    assert second.global_steps == 3
    first.destroy()
    second.destroy()


class Longer(Net):
    """Has a parameter and a buffer that `Net` lacks."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("seen", torch.full((2,), 3.0))


def test_strict_errors_name_what_is_missing(mpi_tmp_path):
    saved(mpi_tmp_path / "short").destroy()
    saved(mpi_tmp_path / "long", model=Longer()).destroy()
    short, long = start(config(1, **ADAM), Net(seed=9)), start(config(2, **ADAM), Longer())
    with pytest.raises(CheckpointError, match="lacks parameters of the model: extra"):
        long.load_checkpoint(str(mpi_tmp_path / "short"))
    with pytest.raises(CheckpointError, match="has parameters the model lacks: extra"):
        short.load_checkpoint(str(mpi_tmp_path / "long"))
    path, _ = long.load_checkpoint(str(mpi_tmp_path / "short"), load_module_strict=False)
    assert path is not None
    assert long.module.extra.tolist() == [2.0] * 3
    short.load_checkpoint(str(mpi_tmp_path / "long"), load_module_strict=False)
    train(long, samples(1))
    short.destroy()
    long.destroy()


@pytest.mark.parametrize(("kind", "name"), [("parameter", r"0\.bias"), ("buffer", "seen")])
def test_another_shape_is_an_error_even_without_strict(kind, name, mpi_tmp_path):
    def make(width):
        model = nn.Sequential(nn.Linear(WIDTH, width if kind == "parameter" else 4))
        model.register_buffer("seen", torch.ones(width))
        return model

    first = start(config(1, **ADAM), make(6))
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(config(1, **ADAM), make(4))
    with pytest.raises(CheckpointError, match=rf"{kind} {name} has shape \(6.*and \(4.*in the model"):
        second.load_checkpoint(str(mpi_tmp_path), load_module_strict=False)
    first.destroy()
    second.destroy()


@STAGES_AND_DTYPES
def test_custom_load_fn_gets_a_whole_state_dict(stage, dtype, mpi_tmp_path):
    first = start(config(1, **ADAM), TinyLM())
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(config(stage, dtype=dtype, **ADAM), TinyLM(seed=9))
    kinds = []

    def load(*, src, dst):
        kinds.append({tensor.dtype for tensor in src.values()})
        dst.load_state_dict(src)

    second.load_checkpoint(str(mpi_tmp_path), custom_load_fn=load, load_module_only=True)
    assert kinds == [{torch.float32}]
    theirs = {name: tensor.to(second.get_data_types()[0]) for name, tensor in weights(first).items()}
    same_bits(weights(second), theirs)
    second.parts.params.refresh()  # masters hold the same values
    same_bits(weights(second), theirs)
    with pytest.raises(CheckpointError, match="planted"):
        second.load_checkpoint(str(mpi_tmp_path), custom_load_fn=lambda src, dst: {}["planted"])
    first.destroy()
    second.destroy()


@STAGES
def test_tied_weights_stay_tied(stage, mpi_tmp_path):
    first = start(config(stage, **ADAM), TinyLM())
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(config(stage, **ADAM), TinyLM(seed=9))
    second.load_checkpoint(str(mpi_tmp_path))
    model = second.module
    assert model.head.weight is model.embed.weight
    tokens = torch.arange(18).view(2, 9) % 61
    second.backward(second(tokens))
    second.step()
    assert model.head.weight is model.embed.weight
    assert not torch.equal(weights(model)["embed.weight"], weights(first)["embed.weight"])
    first.destroy()
    second.destroy()


class Why(enum.Enum):
    LOSS = "loss"


@dataclass
class Stop:
    why: Why
    step: int


@pytest.mark.deepspeed_row("a18")
def test_client_state_comes_back_with_its_types(mpi_tmp_path):
    client = {
        "text": "ein Wort",
        "numbers": [1, 2.5, -3],
        "nested": {"flag": True, "nothing": None, "deep": {"x": 1}},
        "tensor": torch.arange(4).view(2, 2),
        "empty": {},
        "args": argparse.Namespace(path=Path("a"), dtype=torch.int8),
        "stop": Stop(Why.LOSS, 3),
    }
    saved(mpi_tmp_path, tag="mine", client_state=client).destroy()
    second = start(config(1, **ADAM))
    _, plain = second.load_checkpoint(str(mpi_tmp_path), tag="mine")
    assert plain["stop"] == argparse.Namespace(why="loss", step=3)
    _, found = second.load_checkpoint(str(mpi_tmp_path), tag="mine", client_types=[Stop, Why])
    assert torch.equal(found.pop("tensor"), client.pop("tensor"))
    assert list(found.pop("numbers")) == client.pop("numbers")
    assert found == client
    with pytest.raises(TypeError):
        second.save_checkpoint(str(mpi_tmp_path), tag="other", client_state={"object": object()})
    assert second.save_checkpoint(str(mpi_tmp_path), tag="other")  # the failed one left nothing in the way
    second.destroy()


@pytest.mark.deepspeed_row("a5")
@pytest.mark.parametrize("in_background", [False, True])
def test_an_existing_tag_is_replaced(in_background, mpi_tmp_path):
    """As scripts for DeepSpeed do it: `tag="best"`, or a run that resumes and saves at once."""
    engine = saved(mpi_tmp_path, tag="same")
    train(engine, samples(1))
    assert engine.save_checkpoint(str(mpi_tmp_path), tag="same", async_save=in_background)
    engine.wait_checkpoint()
    other = start(config(1, **ADAM))
    other.load_checkpoint(str(mpi_tmp_path))
    assert other.global_steps == 4
    with pytest.raises(CheckpointError, match="'same' exists already"):
        engine.save_checkpoint(str(mpi_tmp_path), tag="same", overwrite=False)
    engine.destroy()
    other.destroy()


def test_the_config_may_forbid_to_replace_a_tag(mpi_tmp_path):
    engine = start(config(1, **ADAM, checkpoint={"overwrite": False}))
    assert engine.save_checkpoint(str(mpi_tmp_path), tag="same")
    with pytest.raises(CheckpointError, match=r"'same' exists already.*checkpoint\.overwrite in the config"):
        engine.save_checkpoint(str(mpi_tmp_path), tag="same")
    assert engine.save_checkpoint(str(mpi_tmp_path), tag="same", overwrite=True)
    engine.destroy()


@STAGES_AND_DTYPES
def test_16_bit_weights_load_in_plain_torch(stage, dtype, mpi_tmp_path):
    model = TinyLM()
    model.norm.bias.requires_grad_(False)
    wanted = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = start(config(stage, dtype=dtype, zero=wanted, **ADAM), model)
    engine.backward(engine(torch.arange(18).view(2, 9) % 61))
    engine.step()
    assert engine.save_16bit_model(str(mpi_tmp_path / "out"))
    assert engine.save_fp16_model(str(mpi_tmp_path / "out"), "small.bin", exclude_frozen_parameters=True)
    state = torch.load(mpi_tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {engine.get_data_types()[0]}
    plain = TinyLM(seed=9).to(engine.get_data_types()[0])
    plain.load_state_dict(state)
    same_bits(weights(plain), weights(engine))
    assert sum(path.stat().st_size for path in (mpi_tmp_path / "out").iterdir()) < 100_000 * 4
    small = torch.load(mpi_tmp_path / "out" / "small.bin", weights_only=True)
    assert set(state) - set(small) == {"norm.bias"}
    engine.destroy()


class Numbered(Dataset):
    """Samples that carry their own number."""

    def __init__(self, length):
        self.x, self.y = samples(1, length)[0]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


@pytest.mark.parametrize("shuffle", [None, True, False])
def test_training_data_are_shuffled_unless_told_otherwise(shuffle, comm):
    settings = config(0, **ADAM, dataloader_shuffle=shuffle)
    engine, _, loader, _ = mpispeed.initialize(model=Net(), config=settings, training_data=Numbered(24))
    parts = [comm.gather_objects(index.tolist()) for index, *_ in loader]
    numbers = [number for micro in parts for part in micro for number in part]
    assert sorted(numbers) == list(range(24))
    assert (numbers == list(range(24))) is (shuffle is False)
    engine.destroy()


@pytest.mark.parametrize(("pending", "length"), [(0, 7), (1, 7), (2, 7), (2, 24)])
def test_a_save_within_a_global_batch_loses_no_sample(pending, length, comm, mpi_tmp_path):
    """The micro-batches since the last step are given again, also where the epoch's last batch was filled up."""
    settings = config(1, **ADAM) | {"train_batch_size": 3 * comm.size, "gradient_accumulation_steps": 3}

    def make():
        return mpispeed.initialize(model=Net(), config=settings, training_data=Numbered(length))

    def run(engine, stream, micros):
        numbers = []
        for _ in range(micros):
            index, x, y = next(stream)
            engine.backward(engine(x, y))
            engine.step()
            numbers += [number for part in comm.gather_objects(index.tolist()) for number in part]
        return numbers

    per_epoch = 3 * -(-length // (3 * comm.size))
    whole, _, loader, _ = make()
    expected = run(whole, iter(mpispeed.RepeatingLoader(loader)), 2 * per_epoch)
    first, _, loader, _ = make()
    kept = per_epoch - 3
    run(first, iter(mpispeed.RepeatingLoader(loader)), kept + pending)
    first.save_checkpoint(str(mpi_tmp_path))
    second, _, loader, _ = make()
    second.load_checkpoint(str(mpi_tmp_path))
    assert second.global_steps == kept // 3
    again = run(second, iter(mpispeed.RepeatingLoader(loader)), 2 * per_epoch - kept)
    assert again == expected[kept * comm.size :]
    same_bits(weights(second), weights(whole))
    for engine in (whole, first, second):
        engine.destroy()


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "CosineAnnealingLR"])
def test_schedulers_of_torch_continue(name, mpi_tmp_path):
    def make(optimizer):
        more = {
            "LambdaLR": {"lr_lambda": lambda step: 0.5**step},
            "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
            "CosineAnnealingLR": {"T_max": 9},
        }[name]
        return getattr(torch.optim.lr_scheduler, name)(optimizer, **more)

    first = start(config(1, **ADAM), lr_scheduler=make)
    train(first, samples(3))
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(config(1, **ADAM), Net(seed=9), lr_scheduler=make)
    second.load_checkpoint(str(mpi_tmp_path))
    for engine in (first, second):
        train(engine, samples(2))
    assert second.get_lr() == first.get_lr()
    same_bits(weights(second), weights(first))
    first.destroy()
    second.destroy()


def test_gradients_of_before_a_load_are_forgotten(mpi_tmp_path):
    first = saved(mpi_tmp_path)
    second = start(config(1, **ADAM, **WARMUP), Net(seed=9))
    second.set_gradient_accumulation_boundary(False)
    second.backward(1000 * second(*own_part(second, samples(1)[0])))
    second.set_gradient_accumulation_boundary(None)
    second.load_checkpoint(str(mpi_tmp_path))
    for engine in (first, second):
        train(engine, samples(1))
    same_bits(weights(second), weights(first))
    first.destroy()
    second.destroy()
