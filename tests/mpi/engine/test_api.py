"""What scripts see of an engine: what initialize returns, schedulers, logs and monitors, the module, the end."""

import contextlib
import csv
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import UsageError
from tests.zoo import same_bits
from tests.zoo.models import BATCH, WIDTH, Net, samples
from tests.zoo.training import ADAM, config, own_part, start, train, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}}


@pytest.fixture
def records(caplog):
    """What this rank logs."""
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    yield lambda word: [r.getMessage() for r in caplog.records if word in r.getMessage()]
    logger.removeHandler(caplog.handler)


# -- what initialize returns -------------------------------------------------------------------------------------


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@pytest.mark.parametrize("scheduler", [None, "object", "callable"])
@pytest.mark.parametrize("optimizer", [None, "object", "callable"])
@pytest.mark.parametrize("stage", [0, 2])
def test_optimizers_and_schedulers_that_are_returned(optimizer, scheduler, stage):
    made = {}
    model = Net()

    def make(params):
        made["optimizer"] = torch.optim.AdamW(params, lr=1e-2)
        return made["optimizer"]

    def make_noted(basic):
        made["scheduler"] = make_scheduler(basic)
        return made["scheduler"]

    client = {None: None, "object": torch.optim.Adam(model.parameters(), lr=1e-2), "callable": make}[optimizer]
    bound = client if optimizer == "object" else torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = {None: None, "object": make_scheduler(bound), "callable": make_noted}[scheduler]
    arguments = {"model": model, "config": config(stage, **ADAM, **WARMUP)}
    if scheduler == "object" and optimizer != "object":
        with pytest.raises(AssertionError, match="bound to an optimizer"):
            mpispeed.initialize(**arguments, optimizer=client, lr_scheduler=schedule)
        arguments["config"] = config(stage, **ADAM)
        schedule = None
    engine, returned, loader, lr_scheduler = mpispeed.initialize(
        **arguments, optimizer=client, lr_scheduler=schedule, model_parameters=model.parameters()
    )
    assert loader is None
    assert returned is engine.optimizer
    assert lr_scheduler is engine.lr_scheduler
    if optimizer is None:
        assert engine.optimizer_name() == "Adam"
        assert isinstance(returned, torch.optim.Optimizer)
    else:
        assert returned is (client if optimizer == "object" else made["optimizer"])
        assert engine.basic_optimizer is returned
    if schedule is not None:
        assert lr_scheduler is (schedule if scheduler == "object" else made["scheduler"])
    elif scheduler is None:
        assert type(lr_scheduler).__name__ == "WarmupLR"
    train(engine, samples(2))
    if schedule is not None:
        assert engine.get_lr() == [pytest.approx(1e-2 / 3)]
    engine.destroy()


@pytest.mark.parametrize("wrong", [3, "Adam", [1]])
def test_optimizers_of_another_type_are_refused(wrong):
    with pytest.raises(AssertionError, match="callable"):
        start(config(), optimizer=wrong)
    with pytest.raises(AssertionError, match="callable passed as optimizer"):
        start(config(), optimizer=lambda params: wrong)


@STAGES
def test_without_an_optimizer_only_forward_works(stage, mpi_tmp_path):
    engine, optimizer, loader, scheduler = mpispeed.initialize(model=Net(), config=config(stage, **WARMUP))
    assert (optimizer, loader, scheduler) == (None, None, None)
    assert engine.get_lr() == engine.get_mom() == []
    loss = engine(*own_part(engine, samples(1)[0]))
    for act in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(AssertionError, match="needs an optimizer"):
            act()
    engine.save_checkpoint(str(mpi_tmp_path))
    other = start(config(stage), Net(seed=99))
    other.load_checkpoint(str(mpi_tmp_path))
    same_bits(weights(other), weights(engine))
    engine.destroy()
    other.destroy()


# -- schedulers ----------------------------------------------------------------------------------------------------


class Noting:
    """A scheduler that is bound to nothing and notes how it was called."""

    def __init__(self):
        self.calls = []

    def state_dict(self):
        return {}


class OnlyPositional(Noting):
    def step(self, samples, /):
        self.calls.append(samples)


class WithKeywords(Noting):
    def step(self, **kwargs):
        self.calls.append(kwargs)


def test_a_scheduler_without_keywords_gets_the_batch_size(comm):
    scheduler = OnlyPositional()
    settings = config(**ADAM)
    settings.update(train_batch_size=2 * comm.size)
    engine = start(settings, lr_scheduler=scheduler)
    train(engine, samples(2, 2 * comm.size))
    engine.set_train_batch_size(4 * comm.size)
    train(engine, samples(1, 4 * comm.size))
    assert scheduler.calls == [2 * comm.size, 2 * comm.size, 4 * comm.size]
    engine.destroy()


def test_keywords_reach_the_scheduler():
    scheduler = WithKeywords()
    engine = start(config(**ADAM), lr_scheduler=scheduler)
    train(engine, samples(1), lr_kwargs={"metric": 0.5})
    train(engine, samples(1))
    assert scheduler.calls == [{"metric": 0.5}, {}]
    engine.destroy()


# -- logs and monitors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2, 3])
def test_count_of_progress_lines(every, records):
    engine = start(config(steps_per_print=every, **ADAM))
    train(engine, samples(7))
    lines = [line for line in records("step=") if line.startswith("step=")]
    assert len(lines) == (7 // every + 1 if engine.global_rank == 0 else 0)
    if lines:
        assert lines[0].startswith("step=0, skipped=0, lr=[0.01], mom=[")
        assert lines[1].startswith(f"step={every}, skipped=0, lr=[0.01]")
    engine.destroy()


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"wall_clock_breakdown": True}, "time (ms)"),
        ({"memory_breakdown": True}, "memory |"),
        ({"dump_state": True}, "config |"),
        ({"comms_logger": {"enabled": True}}, "calls"),
        ({}, None),
    ],
)
def test_loggers_say_something_on_rank_0_when_asked(section, word, records):
    engine = start(config(1, **ADAM, **section))
    train(engine, samples(2))
    engine.destroy()
    for other in ("time (ms)", "memory |", "config |", "calls"):
        is_wanted = other == word and engine.global_rank == 0
        if other == "calls" and engine.world_size == 1:
            continue  # one rank has little to send
        assert bool(records(other)) == is_wanted, other


def read_series(folder, name):
    with (folder / f"Train_Samples_{name}.csv").open() as file:
        return [(int(x), float(y)) for x, y in list(csv.reader(file))[1:]]


def test_csv_monitor_writes_series_of_rank_0(mpi_tmp_path, comm):
    section = {"csv_monitor": {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "run"}}
    engine = start(config(**ADAM, **WARMUP, **section, fp16={"enabled": True, "loss_scale": 4.0}))
    lrs, losses = [], []
    for batch in samples(3):
        lrs.append(engine.get_lr()[0])
        losses += train(engine, [batch])
    engine.destroy()
    comm.barrier()
    folder = mpi_tmp_path / "run"
    assert sorted(path.name for path in mpi_tmp_path.iterdir()) == ["run"]
    assert len(list(folder.iterdir())) == 3
    losses = comm.share(losses)  # rank 0 writes its own
    assert read_series(folder, "train_loss") == [(BATCH * i, pytest.approx(losses[i])) for i in range(3)]
    assert read_series(folder, "lr") == [(BATCH * (i + 1), pytest.approx(lrs[i])) for i in range(3)]
    assert read_series(folder, "loss_scale") == [(BATCH * (i + 1), 4.0) for i in range(3)]


def test_without_monitors_no_file_appears(mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    engine = start(config(**ADAM))
    train(engine, samples(2))
    engine.destroy()
    assert list(mpi_tmp_path.iterdir()) == []


# -- the module behind it ------------------------------------------------------------------------------------------


class _Weighted(nn.Module):
    """Keeps the dtypes of its inputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, 1), []

    def forward(self, x, *, weight):
        self.seen.append((x.dtype, weight.dtype))
        return (self.layer(x) * weight).mean()


@pytest.mark.parametrize(("is_cast", "seen"), [(True, torch.float16), (False, torch.float32)])
def test_auto_cast_is_for_positional_inputs(is_cast, seen):
    engine = start(config(0, **ADAM, fp16={"enabled": True, "auto_cast": is_cast}), _Weighted())
    with contextlib.nullcontext() if is_cast else pytest.raises(RuntimeError, match="auto_cast"):
        engine(torch.ones(1, WIDTH), weight=torch.ones(1))
    assert engine.module.seen == [(seen, torch.float32)]
    engine.destroy()


def test_names_pass_through_to_the_module():
    model = Net()
    model.favourite = 7
    engine = start(config(**ADAM), model)
    assert engine.module is model
    assert engine.favourite == 7
    assert engine.first is model.first
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    assert engine.eval() is engine
    assert not model.training
    assert engine.train() is engine
    assert model.training
    assert next(name for name, _ in engine.named_parameters()) == "module.first.weight"
    engine.destroy()


@STAGES
def test_buffers_start_equal_and_are_saved(stage, comm, mpi_tmp_path):
    def make():
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    torch.manual_seed(3)
    model = make()
    model[1].running_mean.fill_(float(comm.rank + 5))
    model.register_buffer("note", torch.tensor([comm.rank, 2]), persistent=False)
    engine = start(config(stage, **ADAM), model)
    assert model[1].running_mean.tolist() == [5.0] * 4
    assert model.note.tolist() == [0, 2]
    x, y = own_part(engine, samples(1)[0])
    for _ in range(2):
        engine.backward(nn.functional.mse_loss(engine(torch.cat([x, x])), torch.cat([y, y])))
        engine.step()
    engine.save_checkpoint(str(mpi_tmp_path))
    other = start(config(stage, **ADAM), make())
    other.load_checkpoint(str(mpi_tmp_path))
    assert int(other.module[1].num_batches_tracked) == 2
    expected = comm.share(model[1].running_mean.tolist())
    assert other.module[1].running_mean.tolist() == expected
    engine.destroy()
    other.destroy()


# -- several engines, the end ---------------------------------------------------------------------------------------


def test_two_engines_in_one_script():
    data = samples(3)
    first, second = start(config(1, **ADAM)), start(config(2, **ADAM, bf16={"enabled": True}), Net(seed=3))
    alone = start(config(1, **ADAM))
    for batch in data:
        train(first, [batch])
        train(second, [batch])
    first.destroy()
    train(second, data[:1])
    train(alone, data)
    same_bits(weights(first), weights(alone.module))
    second.destroy()
    alone.destroy()


@STAGES
def test_destroy_ends_the_engine_but_not_the_model(stage):
    engine = start(config(stage, **ADAM))
    train(engine, samples(1))
    before = weights(engine)
    engine.destroy()
    engine.destroy()
    loss = engine(*samples(1)[0])
    for act in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(UsageError, match="destroy"):
            act()
    loss.backward()  # plain torch again
    assert engine.module.first.weight.grad is not None
    same_bits(weights(engine), before)
    again = start(config(stage, **ADAM), engine.module)  # and a new engine may take it
    engine.module.zero_grad()
    train(again, samples(1))
    assert again.was_step_applied()
    again.destroy()


def test_new_groups_are_refused():
    engine = start(config(**ADAM))
    train(engine, samples(1))
    with pytest.raises(UsageError, match="cannot be added"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    engine.destroy()


@STAGES
@pytest.mark.parametrize("is_destroyed", [False, True])
def test_engines_are_freed(stage, is_destroyed):
    settings = config(stage, **ADAM)
    settings["zero_optimization"]["overlap_comm"] = True
    model = Net()
    engine = start(settings, model)
    train(engine, samples(1))
    store = weakref.ref(engine.parts.optimization.grads)
    gone = weakref.ref(engine)
    if is_destroyed:
        engine.destroy()
    mesh = engine.mesh
    del engine
    gc.collect()
    if not is_destroyed:
        assert gone() is not None  # as long as there is the model
        del model
        gc.collect()
    assert gone() is None
    assert store() is None
    if is_destroyed:
        model(*samples(1)[0]).backward()  # hooks that are left behind do nothing
        assert model.first.weight.grad is not None
    else:
        mesh.close()


def test_a_loss_that_is_no_scalar_is_named():
    engine = start(config(**ADAM))
    with pytest.raises(UsageError, match=r"a tensor of shape \(3,\)"):
        engine.backward(torch.ones(3, requires_grad=True))
    with pytest.raises(UsageError, match="a list"):
        engine.backward([torch.ones(())])
    engine.destroy()
