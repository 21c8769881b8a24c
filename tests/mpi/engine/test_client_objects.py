"""What belongs to the caller keeps its meaning: dtypes, groups, schedulers and the optimizer object."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from tests.zoo.models import Net, samples
from tests.zoo.training import ADAM, check_equal, config, own_part, start, train, train_plain, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


class Mixed(Net):
    """A bf16 layer, a frozen fp16 parameter and an fp32 buffer in an fp32 model."""

    def __init__(self):
        super().__init__()
        self.first.to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.full((3,), 1 / 3, dtype=torch.float16), requires_grad=False)
        self.register_buffer("inverse", torch.tensor([1 / 3]))

    def forward(self, x, y):
        out = self.last(self.norm(torch.tanh(self.first(x.bfloat16()).float())))
        return nn.functional.mse_loss(out, y)


@STAGES
def test_mixed_models_keep_their_dtypes(stage):
    model, plain = Mixed(), Mixed()
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    engine = start(config(stage, **ADAM), model)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    assert torch.equal(model.inverse, plain.inverse)
    for unit in engine.parts.table.units:
        assert (unit.states.compute, unit.states.full) == (unit.dtype, torch.float32)
    assert {unit.dtype for unit in engine.parts.table.units} == {torch.float32, torch.bfloat16}
    data = samples(3)
    train(engine, data)
    trained = [p for p in plain.parameters() if p.requires_grad]
    train_plain(plain, data, torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0))
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    check_equal(engine.module, plain, rtol=0.05, atol=0.02)
    engine.destroy()


def test_bf16_of_the_config_still_casts():
    model = Mixed()
    engine = start(config(0, bf16={"enabled": True}, **ADAM), model)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    engine.destroy()


@STAGES
def test_frozen_groups_of_a_client_stay_in_place(stage):
    model = Net()
    model.first.requires_grad_(False)
    rest = [*model.norm.parameters(), *model.last.parameters()]
    client = torch.optim.AdamW([{"params": list(model.first.parameters()), "lr": 0.0}, {"params": rest, "lr": 1e-2}])
    schedule = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 0.5**step)
    engine = start(config(stage), model, optimizer=client, lr_scheduler=schedule)
    before = weights(model)
    train(engine, samples(2))
    assert engine.get_lr() == [0.0, 0.25e-2]
    after = weights(model)
    assert [name for name in after if torch.equal(after[name], before[name])] == ["first.weight", "first.bias"]
    engine.destroy()


@pytest.mark.parametrize("way", ["client", "json"])
def test_a_plateau_schedule_needs_metrics(way):
    model, section, more = Net(), dict(ADAM), {}
    if way == "client":
        more["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
        more["lr_scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(more["optimizer"], patience=0)
        section = {}
    else:
        section["scheduler"] = {"type": "ReduceLROnPlateau", "params": {"patience": 0}}
    engine = start(config(0, **section), model, **more)
    before = weights(model)
    with pytest.raises(UsageError, match=r'lr_kwargs=\{"metrics": '):
        train(engine, samples(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())
    engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.get_lr() == [1e-2]
    train(engine, samples(1), lr_kwargs={"metrics": 2.0})
    assert engine.get_lr() == pytest.approx([1e-3])
    engine.destroy()


class Recorder:
    """A scheduler that wants one value, or fails."""

    def __init__(self, error=None):
        self.seen, self.error = [], error

    def step(self, samples, /):
        if self.error:
            raise self.error
        self.seen.append(samples)


def test_one_required_value_is_the_train_batch_size():
    schedule = Recorder()
    engine = start(config(0, **ADAM), lr_scheduler=schedule)
    train(engine, samples(2))
    train(engine, samples(1), lr_kwargs={"epoch": 1})  # no keywords are taken: the batch size again
    assert schedule.seen == [12, 12, 12]
    engine.destroy()


def test_unknown_lr_kwargs_are_refused():
    engine = start(config(0, scheduler={"type": "WarmupLR", "params": {}}, **ADAM))
    with pytest.raises(UsageError, match="does not take lr_kwargs"):
        train(engine, samples(1), lr_kwargs={"nothing": 1})
    engine.destroy()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.filterwarnings("error")
def test_a_clients_optimizer_means_what_it_says(order):
    def make(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, plain = Net(), Net()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = config(0, gradient_accumulation_steps=1)
    engine = start(settings, model, optimizer=client, lr_scheduler=make(client) if order == "before" else make)
    batch = samples(1)[0]
    x, y = own_part(engine, batch)
    engine.backward(engine(100 * x, y))
    engine.optimizer.zero_grad()
    engine.backward(engine(x, y))
    (client if order == "before" else engine).step()  # both are a step of the engine
    assert engine.global_steps == 1
    train_plain(plain, [batch], torch.optim.AdamW(plain.parameters(), lr=1e-2))
    check_equal(model, plain)
    assert engine.get_lr() == pytest.approx([1e-3])
    engine.destroy()
    client.step()  # is the client's own again
    assert not vars(client).get("zero_grad")


def test_type_errors_of_a_scheduler_come_through():
    engine = start(config(0, **ADAM), lr_scheduler=Recorder(TypeError("a mistake inside")))
    with pytest.raises(TypeError, match="a mistake inside"):
        train(engine, samples(1))
    engine.destroy()


def test_a_monitor_that_cannot_write_is_an_error_of_all_ranks(comm, mpi_tmp_path):
    if comm.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    comm.barrier()
    section = {"enabled": True, "output_path": str(mpi_tmp_path / "file" / "below"), "job_name": "run"}
    model = Net()
    with pytest.raises(ConfigError, match=r"csv_monitor.*output_path"):
        start(config(0, csv_monitor=section, **ADAM), model)
    start(config(0, **ADAM), model).destroy()  # nothing of the first is left on the model
